"""RolloutOptions: what an engine is made with that generates for an RL trainer."""

import dataclasses
from typing import Any

import jax
from jax.typing import DTypeLike

from jaxspec.checkpoints.flax_bridge import Names
from jaxspec.checkpoints.from_nnx import Lora
from jaxspec.checkpoints.hub import resolve_directory
from jaxspec.config.checks import check_count, check_positive, is_integer
from jaxspec.config.layer import LayerConfig
from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.model import ModelConfig
from jaxspec.llm.options import LLMOptions
from jaxspec.models.from_config.model import load_model_config
from jaxspec.parallel import make_mesh

GIVEN_BY_TRAINER = {"target": "the actor", "tokenizer": "the trainer", "processes": "the trainer"}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RolloutOptions(LLMOptions):
    """How an engine generates for an actor that a trainer trains.

    >>> RolloutOptions("Qwen/Qwen3-0.6B", "ngram", names="tunix.qwen3", rope_theta=1e6)

    Of ``model`` only the configuration is read, and what its drafter needs: the weights are the
    actor's. ``dtype`` is the actor's by default, ``max_length`` what the trainer's prompts and
    completions need, ``mesh`` all of the trainer's rollout devices with tensor parallelism.

    Attributes:
      names: which array of the actor is which tensor: ``tunix.llama3`` or another name of from_nnx,
        or a table. One of MaxText must fit the actor's config, see from_nnx.
      lora: alpha and rank of an actor with LoRA weights, which are merged: its state does not say.
      rope_theta: the actor rotates by plain RoPE with this base, whatever its config.json says.
        Tunix 0.1.7 does so with 1e6 in its llama3 and qwen3. None: as config.json says.
      vocab_size: rows of the actor's embeddings, if they are padded. None: as config.json says.
      seed: of all sampling, where the trainer names none.
      warm_up: compile all programs of a kind of request when the first call asks for it, so that
        nothing compiles in later calls.
      start_check: compare the logits of actor and engine once, when the engine is made; see
        check_against.
      shares_model: say that the actor's arrays are the engine's. The trainer then gives no weights
        after a step, but before each call if it offloads its models, which needs this.

    Raises ValueError for values that cannot work.
    """

    names: str | Names
    lora: Lora | tuple[float, int] | None = None
    rope_theta: float | None = None
    vocab_size: int | None = None
    seed: int = 0
    warm_up: bool = True
    start_check: bool = True
    shares_model: bool = False

    def __post_init__(self):
        if not (is_integer(self.seed) and 0 <= self.seed < 2**32):
            raise ValueError(f"seed must be an integer in [0, 2**32), got {self.seed!r}")
        if self.rope_theta is not None:
            check_positive(rope_theta=self.rope_theta)
        if self.vocab_size is not None:
            check_count("vocab_size", self.vocab_size)

    def model_config(self) -> ModelConfig:
        """The actor's, as its directory, ``vocab_size`` and ``rope_theta`` say."""
        config = load_model_config(resolve_directory(self.model), "actor")
        if self.vocab_size is not None:
            config = dataclasses.replace(config, vocab_size=self.vocab_size)
        theta = self.rope_theta
        if theta is None:
            return config
        return config.map_layers(lambda layer: _rotating_by(layer, theta))

    def for_actor(self, dtype: DTypeLike, devices: list[Any], max_length: int) -> "RolloutOptions":
        """The same with what the actor and its trainer say where nothing was asked for.

        Args:
          dtype: of the actor's weights.
          devices: of rollouts.
          max_length: tokens of the longest prompt and the longest completion together.

        Raises ValueError for what comes from the trainer.
        """
        for name, giver in GIVEN_BY_TRAINER.items():
            if getattr(self, name) is not None:
                raise ValueError(f"{name} comes from {giver}: leave it out")
        mesh = self.mesh
        if mesh is None and devices != jax.devices()[:1]:
            mesh = make_mesh(len(devices), devices=devices)
        return dataclasses.replace(
            self,
            dtype=dtype if self.dtype is None else self.dtype,
            mesh=mesh,
            max_length=max_length if self.max_length is None else self.max_length,
        )


def _rotating_by(layer: LayerConfig, theta: float) -> LayerConfig:
    if not isinstance(layer.mixer, AttentionConfig):
        kind = type(layer.mixer).__name__
        raise ValueError(f"rope_theta is for layers of attention, not for those of {kind}")
    rope = dataclasses.replace(layer.mixer.rope, theta=float(theta), scaling=None)
    return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, rope=rope))
