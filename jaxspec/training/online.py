"""Online training of a draft head on the texts of the engine that it drafts for."""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.drafters import Drafter, EagleDrafter, MixedDrafter
from jaxspec.engine.engine import Engine
from jaxspec.llm.completion import Completion
from jaxspec.llm.llm import LLM
from jaxspec.models.heads import DraftHead
from jaxspec.models.mlps.expert_linear import AnyExpertLinear
from jaxspec.models.nodes import map_nodes, nodes_of
from jaxspec.models.quantized.float4 import Float4Linear
from jaxspec.models.quantized.float8 import Float8Linear, as_linear, rounded_to_float8
from jaxspec.models.quantized.grouped import GroupedLinear
from jaxspec.models.quantized.kv_cache import without_kv_scales
from jaxspec.models.quantized.scaled import ScaledLinear
from jaxspec.parallel.placement import committed_beside
from jaxspec.training.heads import step as draft_step
from jaxspec.training.heads.data import Answer, answers_as_rows
from jaxspec.training.heads.loss import DraftBatch, check_unrolled
from jaxspec.training.heads.step import DraftTrainConfig
from jaxspec.training.precision import cast_weights
from jaxspec.training.schedule import UNKNOWN_STEPS

UNLEARNT = (GroupedLinear, Float4Linear, ScaledLinear)  # formats that do not learn


class HeadAdapter:
    """Trains the EAGLE head of a running LLM or Engine on what it writes, and puts it to use.

    >>> adapter = HeadAdapter(llm, DraftTrainConfig(learning_rate=3e-4), length=256)
    >>> completions = llm.generate(prompts, sampling)
    >>> adapter.learn(completions, steps=4)  # the next generate drafts with the new weights

    An engine's generations have token ids alone: give them to ``learn_ids``.

    In float32 the text does not change, only the share of accepted drafts; in bfloat16 near-ties
    may flip. Nothing is compiled again. A head in 8-bit floats learns in float32, and is rounded
    for each use.

    Args:
      config: ``batch_size`` rows a step, drawn from the latest ``memory`` completions.
      length: tokens of a row; longer completions are cut.

    Raises ValueError if what serves does not draft with one head, or is split over devices, for a
    head that training does not know (see loss.check_unrolled), and for one in integers or 4-bit
    floats.
    """

    def __init__(
        self, serving: LLM | Engine, config: DraftTrainConfig, *, length: int, memory: int = 256
    ):
        params = serving.params
        drafter = learning_drafter(params.drafter)
        check_unrolled(drafter.head.config)
        if params.mesh is not None:
            raise ValueError("a head cannot learn beside a target that is split over devices")
        self.serving, self._config, self._length = serving, config, length
        self._drafter = drafter
        state = draft_step.init_state(to_train(drafter.head), config)
        self.state = committed_beside(params.target, state)
        self._rows: collections.deque[Answer] = collections.deque(maxlen=memory)
        self._random = np.random.default_rng(config.seed)

    def learn(self, completions: Sequence[Completion], steps: int) -> dict[str, float]:
        """Add completions to the memory, train ``steps`` steps on it, and draft with the result.

        Returns the loss and the accuracy of the first unrolled step, as means over the steps.
        """
        rows = [(each.prompt_token_ids, each.token_ids) for each in completions]
        return self.learn_ids(rows, steps)

    def learn_ids(
        self, rows: Iterable[tuple[Sequence[int], Sequence[int]]], steps: int
    ) -> dict[str, float]:
        """The same as learn, from the token ids of prompts and of what was written."""
        for prompt, ids in rows:
            self._rows.append((len(prompt), [*prompt, *ids][: self._length]))
        if steps < 1 or not self._rows:
            raise ValueError("learning takes at least one step and one completion")
        batches = [self._batch() for _ in range(steps)]
        self.state, metrics = draft_step.train_steps(
            self.state, self.serving.params.target, batches, UNKNOWN_STEPS, self._config
        )
        head = as_served(self.state.head, self._drafter.head)
        current, drafter = self.serving.params.drafter, self._drafter.replace(head=head)
        self.serving.use_drafter(
            current.replace(model=drafter) if isinstance(current, MixedDrafter) else drafter
        )
        return {name: float(metrics[name][0]) for name in ("loss", "accuracy")}

    def _batch(self) -> DraftBatch:
        """Random rows [B, length]; generated tokens are learned, prompts are not."""
        chosen = self._random.integers(len(self._rows), size=self._config.batch_size)
        rows = answers_as_rows([self._rows[row] for row in chosen], self._length)
        return DraftBatch(tokens=jnp.asarray(rows.tokens), learned=jnp.asarray(rows.learned))


def learning_drafter(drafter: Drafter) -> EagleDrafter:
    """What of a drafter learns. Raises ValueError if it has no head, or several."""
    if isinstance(drafter, MixedDrafter):
        drafter = drafter.model
    if not isinstance(drafter, EagleDrafter):
        raise ValueError("only an EAGLE head learns while it serves: give one as drafter")
    if drafter.later:
        raise ValueError("only one head learns while it serves: choose the drafter mtp:1")
    return drafter


def to_train(head: DraftHead) -> DraftHead:
    """A float32 copy, without scales of a cache. Training donates its weights, so the engine needs
    arrays of its own.

    Raises ValueError for quantized experts, and for weights in integers or 4-bit floats,
    whose rounding would undo the steps.
    """
    bare = without_kv_scales(head)
    experts = any(node.in_memory is None for node in nodes_of(bare, AnyExpertLinear))
    if experts or nodes_of(bare, *UNLEARNT):
        raise ValueError(
            "a head with quantized experts or in integers or 4-bit floats cannot learn: give it "
            "as it was before it was quantized, without drafter_bits"
        )
    wide = map_nodes(bare, lambda node: as_linear(node, jnp.dtype(jnp.float32)), Float8Linear)
    return jax.tree.map(jnp.copy, cast_weights(wide, jnp.float32))


def as_served(trained: DraftHead, served: DraftHead) -> DraftHead:
    """A copy of trained weights in the formats and dtypes that they are served in: of most weights
    the model's, but attention sinks stay float32. Those in 8-bit floats are rounded again."""

    def rounded(like: Any, weights: Any) -> Any:
        if not isinstance(like, Float8Linear):
            return weights
        made = rounded_to_float8(weights, len(like.scale))
        return made.replace(activations=like.activations, input_scale=like.input_scale)

    like = without_kv_scales(served)
    same = jax.tree.map(rounded, like, trained, is_leaf=lambda node: isinstance(node, Float8Linear))
    return jax.tree.map(lambda x, served_leaf: jnp.array(x, served_leaf.dtype), same, like)
