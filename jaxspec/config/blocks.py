"""Config of index heads, which choose the blocks of positions that tokens attend to."""

import dataclasses

from jaxspec.config.checks import check_positive


@dataclasses.dataclass(frozen=True)
class BlockIndexConfig:
    """Index heads (MiniMax M3): each scores blocks of positions for the queries of one KV head.

    A block's score is the largest product of the token's index query with the index key of a
    position that the token sees in it. Of equal scores the lower block is the better one.

    Attributes:
      head_dim: of index queries and keys. A token has one key for all index heads.
      size: positions of a block; blocks are counted from the first position on.
      top_k: most blocks that a token attends to, to all positions that it sees in them.
      local: so many of the latest blocks are always among them: the token's own, and those before.
    """

    head_dim: int
    size: int
    top_k: int
    local: int = 1

    def __post_init__(self):
        check_positive(index_head_dim=self.head_dim, index_block_size=self.size)
        check_positive(index_topk_blocks=self.top_k, index_local_blocks=self.local)
        if self.local > self.top_k:
            raise ValueError(
                f"index_local_blocks ({self.local}) must be at most index_topk_blocks "
                f"({self.top_k})"
            )

    @property
    def most(self) -> int:
        """The most positions that a token attends to."""
        return self.size * self.top_k
