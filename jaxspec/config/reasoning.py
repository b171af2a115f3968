"""How long a text may reason."""

import dataclasses

from jaxspec.config.checks import is_integer

MOST_MARKER = 16  # tokens of a marker


@dataclasses.dataclass(frozen=True)
class ReasoningBudget:
    """Most tokens of a text's reasoning. After as many, ``end`` is generated, token by token.

    Attributes:
      tokens: of the reasoning, without its markers; 0: it ends where it begins. What the text has
        of ``end`` by then is not repeated.
      end: token ids of the marker that ends it.
      begin: of the one that begins it, which the text may have; empty: it has none.
      inside: whether the text begins within reasoning, as its prompt has the marker.
      repeats: whether the text may reason again after ``end``; the budget is that of each time.
    """

    tokens: int
    end: tuple[int, ...]
    begin: tuple[int, ...] = ()
    inside: bool = False
    repeats: bool = False

    def __post_init__(self):
        if not is_integer(self.tokens) or self.tokens < 0:
            raise ValueError(f"tokens must be an integer, at least 0, got {self.tokens!r:.80}")
        for name in ("end", "begin"):
            given = getattr(self, name)
            marker = tuple(given) if isinstance(given, (tuple, list)) else (None,)
            object.__setattr__(self, name, marker)
            if not all(map(is_integer, marker)) or len(marker) > MOST_MARKER:
                raise ValueError(f"{name} must be at most {MOST_MARKER} token ids")
        if not self.end:
            raise ValueError("end must have a token id")
        if not self.begin and not self.inside:
            raise ValueError("begin must have a token id, or inside be True")
