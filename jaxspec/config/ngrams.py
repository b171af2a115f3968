"""Config of embeddings of n-grams of tokens."""

import dataclasses

from jaxspec.config.checks import check_positive


@dataclasses.dataclass(frozen=True)
class NgramConfig:
    """What residual streams get of a token and of those before it (Qwen3.8-Flash-Next).

    A token and the ones before it, two together or more, are hashed to rows of a table, by several
    heads each.

    Attributes:
      multipliers: of the hash: of a token, of the one before it, and so on: as many as the longest
        n-gram has tokens. Below 2 ** 63.
      sizes: rows of each head, of which the hash is a remainder: first those of two tokens, then of
        three, and so on. Every n-gram has as many heads.
      end: the token that ends a text. It stands for it and for all before it, and for what is
        before the first token.
      width: entries of a row.
      rows: of the table, with those that no head has.
      parts: tensors that the table is stored in.
      float8: the table has 8-bit floats (e4m3), which are multiplied by one number.
      taps: of the convolution that follows; from one to the next are as many tokens as the longest
        n-gram has.
    """

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    end: int
    width: int
    rows: int
    parts: int
    taps: int
    float8: bool = False

    def __post_init__(self):
        check_positive(ple_embed_dim=self.width, split_ngram_parts=self.parts)
        check_positive(ngram_vocab_size_base=min(self.sizes, default=0))
        if self.tokens < 2 or len(self.sizes) % (self.tokens - 1):
            raise ValueError(f"ngram_size must be 2 or more, with as many heads each, got "
                f"{self.tokens} and {len(self.sizes)}")  # fmt: skip
        if max(self.multipliers) >= 2**63 or min(self.multipliers) < 0:
            raise ValueError("multipliers of a hash must be from 0 to 2 ** 63 - 1")
        if max(self.sizes) >= 2**31 or self.rows >= 2**31:
            raise ValueError(f"ngram_vocab_size_base: a table of {self.rows} rows is too long, "
                f"it must have fewer than {2**31}")  # fmt: skip
        if self.rows < sum(self.sizes):
            raise ValueError(f"{sum(self.sizes)} rows of heads do not fit a table of {self.rows}")
        if self.taps < 2:
            raise ValueError(f"ple_conv_kernel_size must be 2 or more, got {self.taps}")

    @property
    def tokens(self) -> int:
        """How many the longest n-gram has."""
        return len(self.multipliers)

    @property
    def heads(self) -> int:
        """How many each n-gram has."""
        return len(self.sizes) // (self.tokens - 1)

    @property
    def embedding(self) -> int:
        """Entries of the rows of all heads."""
        return self.width * len(self.sizes)

    @property
    def past(self) -> int:
        """Tokens before one that the convolution reaches back to."""
        return (self.taps - 1) * self.tokens
