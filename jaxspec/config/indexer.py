"""Configs of sparse attention: which of the positions that a token sees it attends to."""

import dataclasses

from jaxspec.config.checks import check_positive


@dataclasses.dataclass(frozen=True)
class IndexerConfig:
    """An indexer beside latent attention (DeepSeek-V3.2, arXiv 2512.02556): it scores the positions
    that a token sees, and the token attends to the best ``top_k``; to all, if it sees no more. Of
    equal scores the lower position is the better one.

    Attributes:
      num_heads, head_dim: of the indexer's queries. It keeps one key of a token.
      interleaved: the first entries of its queries and keys are rotated as the layer's keys are. Of
        these entries 2 i and 2 i + 1 are a pair; else i and i + R / 2.
      shared: the layer has no weights of an indexer. It attends to what the last layer before it
        chose that has some (arXiv 2603.12201).
      pool: so many consecutive tokens have one key together, and are chosen together; those of an
        unfinished pool always are (see pallas_kernels/latent_attention/pools.py). 1: each token
        has a key.
      rotates_last: the last entries of its queries and keys are rotated, not the first.
      norm_eps: of the norm of keys.
    """

    top_k: int
    num_heads: int
    head_dim: int
    interleaved: bool
    shared: bool = False
    pool: int = 1
    rotates_last: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self):
        check_positive(index_topk=self.top_k, index_n_heads=self.num_heads)
        check_positive(index_head_dim=self.head_dim, index_kpool=self.pool)
        if self.top_k % self.pool:
            raise ValueError(
                f"index_topk ({self.top_k}) must be a multiple of index_kpool ({self.pool})"
            )

    @property
    def stored_dim(self) -> int:
        """Entries that are kept of a token: a key, and with pools a gate beside it."""
        return self.head_dim if self.pool == 1 else 2 * self.head_dim

    @property
    def most(self) -> int:
        """The most positions that a token attends to."""
        return self.top_k + self.pool - 1

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return (self.num_heads * self.head_dim) ** -0.5


@dataclasses.dataclass(frozen=True)
class MeanIndexerConfig:
    """An indexer beside attention with grouped KV heads (Qwen3.8-Flash-Next): it scores spans of
    consecutive tokens, and a token attends to those of the best spans, and to those of its own
    unfinished one. Of equal scores the lower span is the better one.

    Attributes:
      top_k: tokens of whole spans that a token attends to at most.
      num_heads, head_dim: of the indexer's queries. Its key of a span is the mean of its tokens'.
      span: tokens that are chosen together.
    """

    top_k: int
    num_heads: int
    head_dim: int
    span: int

    def __post_init__(self):
        check_positive(indexer_budget=self.top_k, indexer_n_heads=self.num_heads)
        check_positive(indexer_head_dim=self.head_dim, indexer_compress_ratio=self.span)
        if self.top_k % self.span:
            raise ValueError(
                f"indexer_budget ({self.top_k}) must be a multiple of indexer_compress_ratio "
                f"({self.span})"
            )

    @property
    def most(self) -> int:
        """The most positions that a token attends to."""
        return self.top_k + self.span - 1

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return self.head_dim**-0.5
