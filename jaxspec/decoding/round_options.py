"""The static options of the programs that run the model: one object, passed down unchanged."""

import dataclasses

from jaxspec.config.speculation import SpeculationConfig
from pallas_kernels.selection import Kernels


@dataclasses.dataclass(frozen=True)
class RoundOptions:
    """What a program is compiled for, in addition to the shapes of its arguments.

    ``functional.decode`` and ``prefill`` say what each option does. Programs that read prompts
    ignore those of rounds, and programs of rounds those of reading.

    Attributes:
      speculation: the shape of this call's trees, the acceptance rule and the proposal.
      kernels: the operations that run as kernels.
      columns: width of the page table that the program sees; None: all of it.
      greedy: no row samples, so the program does no sampling.
      controls: apply the controls of the rows.
      logprobs: emit the log-probability of every token.
      top_logprobs: how many of the likeliest tokens to emit beside every token.
      policy_logprobs: emit the log-probability of every token under the policy that samples it.
      hidden: target hidden states to emit with every token (see models.decoder.run).
      max_rounds: of rounds: how many the result holds.
      fixed: of rounds: run ``max_rounds``, whatever the limit.
      checked: of rounds: end rows that were to decode before their prompt was read.
      trees: of rounds: emit the tree of every round.
      confidence: of rounds: emit what the drafter thinks of its chains; see DraftTree.
      width: of reading: prompt tokens of a row in a chunk.
      prompt_logprobs: of reading: emit log-probabilities of the prompt's tokens, too.
      order_invariant: of reading: a prompt is read like trees are verified at a fixed width: see
        SpeculationConfig.verify_width.
    """

    speculation: SpeculationConfig
    kernels: Kernels = dataclasses.field(default_factory=Kernels)
    columns: int | None = None
    greedy: bool = False
    controls: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    policy_logprobs: bool = False
    hidden: tuple[int, ...] = ()

    max_rounds: int = 1
    fixed: bool = False
    checked: bool = True
    trees: bool = False
    confidence: bool = False

    width: int = 1
    prompt_logprobs: bool = False
    order_invariant: bool = False

    @property
    def isolate_blocks(self) -> bool:
        """Whether XLA compiles each block of the target by itself (see models.decoder.run), so that
        programs with other drafters round alike."""
        return self.order_invariant or self.speculation.verify_width is not None
