"""Configs of mixtures of experts."""

import dataclasses
from typing import Literal

from jaxspec.config.checks import check_positive

# How a router turns its logits into scores. softmax: over all experts. sigmoid: of each expert.
# sqrt_softplus: of each expert, the square root of log(1 + exp(logit)).
# chosen: experts are chosen by their logits, and the softmax is over the chosen ones.
Scores = Literal["softmax", "sigmoid", "sqrt_softplus", "chosen"]


# How checkpoints store a projection of all experts as one tensor. stacked: [E, out, in], the up
# projection after the gate. interleaved: [E, in, out], gate and up by turns (gpt-oss). halves: [E,
# in, out], the up projection after the gate, or as stacked where the shapes say so (Qwen3-VL).
Fused = Literal["stacked", "interleaved", "halves"]


@dataclasses.dataclass(frozen=True)
class RoutingConfig:
    """How each token chooses ``top_k`` of ``num_experts`` experts, and how these are weighted.

    Attributes:
      normalize: the scores of the chosen experts are divided by their sum.
      scale: factor of the weights, after that.
      num_groups, top_groups: only experts of the ``top_groups`` best of so many groups are chosen.
        A group counts by the sum of its two best scores.
      correction: a vector is added to the scores for the choice, but not for the weights
        (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). None: where the checkpoint has one.
      bias: of the router's logits.
      token_ids: experts are not chosen: a table has those of so many ids of tokens. Their scores
        are the router's. None: they are chosen.
    """

    num_experts: int
    top_k: int
    scores: Scores = "softmax"
    normalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    correction: bool | None = False
    bias: bool = False
    token_ids: int | None = None

    def __post_init__(self):
        check_positive(
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
        )
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"{self.num_experts} experts cannot be split into {self.num_groups} groups"
            )
        if self.top_groups > self.num_groups:
            raise ValueError(f"{self.top_groups} of {self.num_groups} groups cannot be chosen")
        size = self.num_experts // self.num_groups
        if self.num_groups > 1 and size < 2:
            raise ValueError(f"a group counts by two of its experts, and has {size}")
        if self.top_k > self.top_groups * size:
            raise ValueError(f"{self.top_k} experts cannot be chosen from {self.top_groups * size}")
        if self.token_ids is not None:
            check_positive(token_ids=self.token_ids)
        if self.token_ids is not None and (self.correction or self.scores in ("chosen", "softmax")):
            raise ValueError("experts of a token's id have scores of their own, not corrected")
        if self.scores == "chosen" and (self.normalize or self.num_groups > 1):
            raise ValueError("a softmax over the chosen experts is normalized, and has no groups")


@dataclasses.dataclass(frozen=True)
class ClampedSwiglu:
    """(up + 1) * gate * sigmoid(alpha * gate), where gate is at most ``limit`` and up is between
    plus and minus ``limit`` (gpt-oss, MiniMax M3)."""

    alpha: float
    limit: float

    def __post_init__(self):
        check_positive(alpha=self.alpha, limit=self.limit)


@dataclasses.dataclass(frozen=True)
class LimitedSwiglu:
    """silu(gate) * up, where silu(gate) is at most ``limit`` and up is between plus and minus
    ``limit`` (Step 3.5)."""

    limit: float

    def __post_init__(self):
        check_positive(limit=self.limit)


@dataclasses.dataclass(frozen=True)
class BoundedSwiglu:
    """silu(gate) * up, where gate is at most ``limit`` and up is between plus and minus ``limit``
    (GLM-5-Next)."""

    limit: float

    def __post_init__(self):
        check_positive(limit=self.limit)


@dataclasses.dataclass(frozen=True)
class SquaredRelu:
    """relu(up) squared, without a gate (Nemotron-H)."""


# What experts make of gate and up, where it is not SwiGLU. gelu_tanh: as Activation has it.
ExpertActivation = (
    ClampedSwiglu | LimitedSwiglu | BoundedSwiglu | SquaredRelu | Literal["gelu_tanh"]
)


@dataclasses.dataclass(frozen=True)
class ExpertNames:
    """Names of a checkpoint's modules inside a layer. ``shared`` empty: projections of the shared
    expert are in ``block`` itself."""

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts: SwiGLU, unless they have another activation.

    Attributes:
      intermediate_size: hidden units of each expert.
      shared_size: hidden units of the expert that all tokens go through; 0: there is none.
      shared_gate: its output is multiplied by a sigmoid of the token.
      activation: of the experts; None: SwiGLU.
      shared_activation: of the shared expert.
      shared_fused: checkpoints have its gate and up projections in one tensor, ``gate_up_proj``.
      bias: of the experts' projections.
      weighs_input: what a token's expert reads is multiplied by its weight, not what it gives
        (Llama 4). Each token has one expert.
      latent: entries of a vector that the experts read and write in place of hidden states: a
        projection of these. None: there is no such vector.
      names, fused: what a checkpoint calls the weights. ``fused`` None: each expert has tensors of
        its own.
    """

    intermediate_size: int
    routing: RoutingConfig
    shared_size: int = 0
    shared_gate: bool = False
    activation: ExpertActivation | None = None
    shared_activation: ClampedSwiglu | LimitedSwiglu | BoundedSwiglu | SquaredRelu | None = None
    shared_fused: bool = False
    bias: bool = False
    weighs_input: bool = False
    latent: int | None = None
    names: ExpertNames = ExpertNames()
    fused: Fused | None = None

    def __post_init__(self):
        check_positive(intermediate_size=self.intermediate_size)
        if self.latent is not None:
            check_positive(latent=self.latent)
        if self.shared_size < 0:
            raise ValueError(f"shared_size must be 0 or above, got {self.shared_size}")
        if self.weighs_input and self.routing.top_k != 1:
            raise ValueError(
                f"num_experts_per_tok must be 1 where inputs are weighted, got {self.routing.top_k}"
            )
        for name in ("shared_gate", "shared_activation", "shared_fused"):
            if getattr(self, name) and not self.shared_size:
                raise ValueError(f"{name} needs a shared expert")

    @property
    def active_size(self) -> int:
        """Hidden units that a token goes through."""
        return self.routing.top_k * self.intermediate_size + self.shared_size
