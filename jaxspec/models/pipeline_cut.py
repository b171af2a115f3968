"""Cuts a model's layers into the stages of a pipeline."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxspec.config.mixers import LatentConfig
from jaxspec.config.model import ModelConfig
from jaxspec.models.decoder import Decoder, decoder_shapes
from jaxspec.models.layer import layer_shape
from jaxspec.models.pipeline_stage import Stage
from jaxspec.parallel import Shards, mesh_layout


class Pipeline(NamedTuple):
    """A model in stages; the decoder has the last layers, if any."""

    stages: tuple[Stage, ...]
    last: Decoder

    @property
    def parts(self) -> tuple[Stage | Decoder, ...]:
        return (*self.stages, self.last)


def pipeline_shapes(
    config: ModelConfig, dtype: jnp.dtype, meshes: Sequence[Mesh], layers: Sequence[int]
) -> Pipeline:
    """A pipeline of ShapeDtypeStructs, with so many layers on each mesh.

    Raises ValueError for sizes that cannot be split evenly, and for recurrent layers: they keep the
    nodes of one tree at a time, and the rounds of several groups are under way in a pipeline. Also
    for layers that read what no stage before them sends: keys and values, tokens, and several
    residual streams.
    """
    if config.is_recurrent:
        raise ValueError("recurrent layers cannot be split into stages: take pp 1")
    if config.sources or config.token_input or config.has_streams:
        raise ValueError(
            "layers that read keys and values of another layer, or more of a token than one "
            "residual stream, cannot be split into stages: take pp 1"
        )
    stages, first = [], 0
    for mesh, count in zip(meshes, layers, strict=True):
        layout = mesh_layout(mesh)
        shards = Shards.over(mesh, layout)
        stage_layers = tuple(
            layer_shape(layer, config.hidden_size, dtype, shards)
            for layer in config.layers[first : first + count]
        )
        stages.append(
            Stage(layers=stage_layers, first=first, config=config, layout=layout, mesh=mesh)
        )
        first += count
    *before, last = stages
    decoder = decoder_shapes(config, dtype, Shards.over(last.mesh, last.layout))
    return Pipeline(tuple(before), decoder.replace(layers=last.layers))


def as_one(parts: Sequence[Any]) -> Decoder:
    """The decoder of a pipeline with the layers of all parts."""
    return parts[-1].replace(layers=tuple(layer for part in parts for layer in part.layers))


def cut(whole: Decoder, like: Pipeline) -> Pipeline:
    """The inverse of as_one, for a pipeline with as many layers in each part as ``like``."""
    stages = [
        stage.replace(layers=whole.layers[stage.first : stage.first + len(stage.layers)])
        for stage in like.stages
    ]
    first = len(whole.layers) - len(like.last.layers)
    return Pipeline(tuple(stages), whole.replace(layers=whole.layers[first:]))


def chosen_layers(
    config: ModelConfig,
    dtype: jnp.dtype,
    meshes: Sequence[Mesh],
    drafted: float,
    *,
    drafter_has_devices: bool,
) -> tuple[int, ...]:
    """Layers for each mesh, so that all read about as many bytes in a round.

    Args:
      drafted: bytes that drafting reads in a round, on each device of the last mesh.
      drafter_has_devices: the last mesh has no layers.
    """
    sharing = layers_that_share(config)
    if drafter_has_devices:
        return (*split_layers(_layer_bytes(config, dtype), 0.0, len(meshes) - 1, sharing), 0)
    devices = meshes[-1].size
    head = config.vocab_size * config.hidden_size * jnp.dtype(dtype).itemsize
    costs = [cost / devices for cost in _layer_bytes(config, dtype)]
    return split_layers(costs, drafted + head / devices, len(meshes), sharing)


def layers_that_share(config: ModelConfig) -> frozenset[int]:
    """Indices of the layers that attend to what an earlier one chose (see mixers/latent.py): no
    stage begins with one, as no choice is moved to other devices."""
    mixers = (layer.mixer for layer in config.layers)
    indexers = [mixer.indexer if isinstance(mixer, LatentConfig) else None for mixer in mixers]
    return frozenset(i for i, indexer in enumerate(indexers) if indexer and indexer.shared)


def _layer_bytes(config: ModelConfig, dtype: jnp.dtype) -> list[float]:
    shapes = (layer_shape(layer, config.hidden_size, dtype) for layer in config.layers)
    return [
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shape)) for shape in shapes
    ]


def check_layers(layers: Sequence[int], config: ModelConfig, stages: int) -> None:
    """Raise ValueError unless these are layers for each of so many stages."""
    shown = ",".join(map(str, layers))
    if len(layers) != stages:
        raise ValueError(f"layers {shown} are of {len(layers)} stages, there are {stages}")
    if sum(layers) != config.num_layers:
        raise ValueError(
            f"layers {shown} are {sum(layers)} together, the model has {config.num_layers}"
        )
    if min(layers[:-1]) < 1 or layers[-1] < 0:
        raise ValueError(f"layers {shown}: every stage but the last needs at least one")
    firsts = set(itertools.accumulate(layers[:-1]))
    if wrong := sorted(firsts & layers_that_share(config)):
        raise ValueError(
            f"layers {shown}: a stage begins with layer {wrong[0]}, which attends to what the "
            "indexer of an earlier layer chose: begin with one that indexer_types calls full"
        )


def split_layers(
    costs: Sequence[float], after: float, stages: int, sharing: frozenset[int] = frozenset()
) -> tuple[int, ...]:
    """How many layers each stage gets, so that the slowest stage is as fast as it can be.

    Args:
      costs: of each layer.
      after: what the last stage does besides, such as the LM head and drafting.
      sharing: indices of layers with which no stage begins.

    All stages but the last have at least one layer. Raises ValueError for more stages than that.
    """
    most = len(costs) + 1 - len(sharing)
    if not 1 <= stages <= most:
        raise ValueError(
            f"{len(costs)} layers cannot be split over {stages} stages: they can over 1 to {most}"
        )
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[n]: the fastest split of the layers before n over the stages so far
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for _ in range(stages - 1):
        best = {
            end: min(
                (max(slowest, sums[end] - sums[start]), (*split, end - start))
                for start, (slowest, split) in best.items()
                if start < end
            )
            for end in range(1 + min(best), len(costs) + 1)
            if end not in sharing
        }
    total = sums[-1]
    options = (
        (max(slowest, total - sums[end] + after), (*split, len(costs) - end))
        for end, (slowest, split) in best.items()
    )
    return min(options)[1]
