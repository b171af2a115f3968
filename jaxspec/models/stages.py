"""Stages of a pipeline: parts of a model's layers, each on devices of its own.

The last part of the layers belongs to the Decoder, with the embeddings and the LM head. The parts
before it are Stages. A Passage leaves the embeddings, visits the stages in order, and returns to
the decoder: see decoder.enter and decoder.run. How a model is cut into stages is in pipeline.py.
"""

from jax import Array
from jax.sharding import Mesh

from jaxspec.cache import Geometry, LayerStates, ModelState
from jaxspec.config.model import ModelConfig
from jaxspec.models.attention import PagedAttend
from jaxspec.models.forward import make_pass
from jaxspec.models.layer import Layer, run_layers
from jaxspec.parallel import WHOLE, Layout
from jaxspec.pytree import Pytree, array, pytree, static
from pallas_kernels.selection import NO_KERNELS, Kernels


@pytree
class Stage(Pytree):
    """Consecutive layers of a model.

    Attributes:
      first: index of the first of them in the model.
      config: of the whole model.
      exchange: memory in which devices add up row-parallel products; see exchanges.py.
    """

    layers: tuple[Layer, ...]
    first: int = static()
    config: ModelConfig = static()
    layout: Layout = static(default=WHOLE)
    mesh: Mesh = static()
    exchange: Array | None = array("peers", "cells", default=None)

    def init_state(self, geometry: Geometry) -> ModelState:
        """Empty states of its layers."""
        states = (layer.mixer.init_state(geometry, self.layout) for layer in self.layers)
        return ModelState(layers=tuple(states), layout=self.layout)


@pytree
class Passage(Pytree):
    """Tokens [B, T] on their way through a model's stages.

    Attributes:
      x: the residual stream after the layers so far.
      captured: states that the layers so far were asked for, by index (see decoder.run).
      positions: rotary positions.
      attend: how the tokens attend to the past.
    """

    x: Array = array("batch", "length", "whole_hidden")  # [B, T, H]
    captured: dict[int, Array]
    positions: Array = array("batch", "length")  # int32 [B, T]
    attend: PagedAttend


def run_stage(
    stage: Stage,
    states: LayerStates,
    passage: Passage,
    capture: tuple[int, ...],
    kernels: Kernels = NO_KERNELS,
    *,
    apart: bool = False,
) -> tuple[LayerStates, Passage]:
    """Run a stage's layers. ``capture`` and ``apart``: as in decoder.run."""
    config = stage.config
    step = make_pass(
        config.layers,
        passage.positions,
        passage.attend,
        config.rms_norm_eps,
        stage.layout,
        kernels,
        apart=apart,
        exchange=stage.exchange,
    )
    normed = step.norm(passage.x, stage.layers[0].input_norm)
    after, _, states = run_layers(stage.layers, passage.x, normed, states, step, None)
    *entering, x = [passage.x, *after]
    own = {stage.first + index: state for index, state in enumerate(entering)}
    captured = {index: own[index] for index in own.keys() & set(capture)}
    return states, passage.replace(x=x, captured=passage.captured | captured)
