"""The static options of one compiled call, chosen by the engine and passed down."""

import dataclasses

from jaxspec.config.speculation import SpeculationConfig
from pallas_kernels.selection import Kernels


@dataclasses.dataclass(frozen=True)
class Call:
    """What a program is compiled for, in addition to the shapes of its arguments.

    Attributes:
      speculation: the shape of this call's trees, the acceptance rule and the proposal.
      greedy: no row samples, so the program does no sampling.
      kernels: the operations that run as kernels.
      logprobs: emit the log-probability of every token.
      top_logprobs: how many of the likeliest tokens to emit beside every token.
      prompt_logprobs: emit these of the prompt's tokens too.
      controls: apply the controls of the rows.
      order_invariant: a prompt is read like trees are verified at a fixed width: see
        SpeculationConfig.verify_width.
      hidden: target hidden states to emit with every token (see models.decoder.run).
      trees: emit the tree of every round.
      confidence: emit what the drafter thinks of its chains; see DraftTree.
    """

    speculation: SpeculationConfig
    greedy: bool = False
    kernels: Kernels = dataclasses.field(default_factory=Kernels)
    logprobs: bool = False
    hidden: tuple[int, ...] = ()
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    controls: bool = False
    order_invariant: bool = False
    trees: bool = False
    confidence: bool = False

    @property
    def apart(self) -> bool:
        """Whether XLA compiles each block of the target by itself (see models.decoder.run), so that
        programs with other drafters round alike."""
        return self.order_invariant or self.speculation.verify_width is not None
