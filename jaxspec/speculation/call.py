"""The static choices of one compiled call, made by the engine and passed down."""

import dataclasses

from jaxspec.config import SpeculationConfig
from pallas_kernels.selection import Kernels


@dataclasses.dataclass(frozen=True)
class Call:
    """What a program is compiled for, beyond the shapes of its arguments.

    Attributes:
      speculation: the shape of this call's trees and the rules that they follow.
      greedy: no row samples, so the work of sampling is left out.
      kernels: the operations that run as kernels.
      logprobs: give the log-probability of every token.
      hidden: the target's hidden states to give with every token (see models.decoder.run).
    """

    speculation: SpeculationConfig
    greedy: bool = False
    kernels: Kernels = dataclasses.field(default_factory=Kernels)
    logprobs: bool = False
    hidden: tuple[int, ...] = ()
