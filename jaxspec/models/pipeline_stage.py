"""Stages of a pipeline: parts of a model's layers, each on devices of its own.

The last part of the layers belongs to the Decoder, with the embeddings and the LM head. The parts
before it are Stages. A Passage leaves the embeddings, visits the stages in order, and returns to
the decoder: see decoder.enter and decoder.run. How a model is cut into stages is in pipeline.py.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxspec.cache import Geometry, LayerStates, ModelState
from jaxspec.config.model import ModelConfig
from jaxspec.models.attention import PagedAttend
from jaxspec.models.forward_pass import make_pass
from jaxspec.models.layer import Layer, run_layers
from jaxspec.parallel import WHOLE, Layout
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.selection import NO_KERNELS, Kernels


@pytree
class Stage(Pytree):
    """Consecutive layers of a model.

    Attributes:
      first: index of the first of them in the model.
      config: of the whole model.
      exchange: memory in which devices add up row-parallel products.
    """

    layers: tuple[Layer, ...]
    first: int = static()
    config: ModelConfig = static()
    layout: Layout = static(default=WHOLE)
    mesh: Mesh = static()
    exchange: Array | None = array("peers", "cells", default=None)

    def init_state(self, geometry: Geometry) -> ModelState:
        """Empty states of its layers."""
        states = (layer.init_state(geometry, self.layout) for layer in self.layers)
        return ModelState(layers=tuple(states), layout=self.layout)


@pytree
class Passage(Pytree):
    """Tokens [B, T] on their way through a model's stages, in two arrays: each array that is moved
    to other devices costs the host time.

    Attributes:
      states: hidden states side by side: the residual stream after the layers so far, and those
        that the layers so far were asked for (see decoder.run).
      tokens: what a PagedAttend has, side by side; None after the last stage.
      captured: indices of the states that were asked for.
      columns: of the page table.
      words: of a token's ancestor mask; 0: consecutive tokens.
      order_invariant: as PagedAttend has it.
    """

    states: Array = array("batch", "length", "whole_hidden")  # [B, T, (1 + n) * H]
    tokens: Array | None = array("batch", "length")  # int32 [B, 3 + columns + (2 + words) * T]
    captured: tuple[int, ...] = static(default=())
    columns: int = static()
    words: int = static()
    order_invariant: bool = static()

    @property
    def x(self) -> Array:
        """The residual stream [B, T, H]."""
        return self._each()[0]

    @property
    def residuals(self) -> dict[int, Array]:
        """The states [B, T, H] that were asked for, by index."""
        return dict(zip(self.captured, self._each()[1:], strict=True))

    def _each(self) -> list[Array]:
        return jnp.split(self.states, 1 + len(self.captured), axis=-1)

    @property
    def attend(self) -> PagedAttend:
        """How the tokens attend to the past."""
        assert self.tokens is not None
        batch, length, _ = self.states.shape
        sizes = [1, 1, 1, self.columns, length, length]
        cuts = np.cumsum(sizes).tolist()
        rows, lens, ends, table, slots, positions, masks = jnp.split(self.tokens, cuts, axis=1)
        ancestors = masks.astype(jnp.uint32).reshape(batch, length, -1) if self.words else None
        return PagedAttend(
            rows=rows[:, 0],
            page_table=table,
            context_lens=lens[:, 0],
            slots=slots,
            positions=positions,
            kv_lens=ends[:, 0],
            ancestors=ancestors,
            order_invariant=self.order_invariant,
        )

    def after(self, x: Array, captured: dict[int, Array]) -> "Passage":
        """With the residual stream after further layers, and what was asked for of them."""
        every = [x, *self._each()[1:], *captured.values()]
        return self.replace(
            states=jnp.concatenate(every, axis=-1), captured=(*self.captured, *captured)
        )


def new_passage(x: Array, attend: PagedAttend) -> Passage:
    """Tokens with embeddings x [B, T, H], at rotary positions ``attend.positions``."""
    columns = [attend.rows, attend.context_lens, attend.kv_lens]
    parts = [column[:, None] for column in columns]
    parts += [attend.page_table, attend.slots, attend.positions]
    words = 0
    if attend.ancestors is not None:
        words = attend.ancestors.shape[-1]
        parts.append(attend.ancestors.reshape(len(x), -1))
    return Passage(
        states=x,
        tokens=jnp.concatenate([part.astype(jnp.int32) for part in parts], axis=1),
        columns=attend.page_table.shape[1],
        words=words,
        order_invariant=attend.order_invariant,
    )


def run_stage(
    stage: Stage,
    states: LayerStates,
    passage: Passage,
    capture: tuple[int, ...],
    kernels: Kernels = NO_KERNELS,
    *,
    isolate_blocks: bool = False,
) -> tuple[LayerStates, Passage]:
    """Run a stage's layers. ``capture`` and ``isolate_blocks``: as in decoder.run."""
    config, attend, start = stage.config, passage.attend, passage.x
    step = make_pass(
        config.layers,
        attend.positions,
        attend,
        config.rms_norm_eps,
        stage.layout,
        kernels,
        isolate_blocks=isolate_blocks,
        exchange=stage.exchange,
    )
    normed = step.norm(start, stage.layers[0].input_norm)
    after, _, states = run_layers(stage.layers, start, normed, states, step, None)
    *entering, x = [start, *after]
    residuals = dict(enumerate(entering, stage.first))
    return states, passage.after(
        x, {index: residuals[index] for index in captured_here(stage, capture)}
    )


def captured_here(stage: Stage, capture: tuple[int, ...]) -> list[int]:
    """Those of ``capture`` that are states before one of the stage's layers."""
    return sorted({*capture} & {*range(stage.first, stage.first + len(stage.layers))})
