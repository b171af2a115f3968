"""Random weights of a given shape, made on the device: no checkpoint, no host copies.

Every array has its own random values. With zeros, or with one array used twice, the compiler could
merge work and the GPU would use less power, so timings would be too good.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.checkpoints.safetensors_io import placements
from jaxspec.config.model import ModelConfig
from jaxspec.config.quantization import ExpertFormat, Scheme
from jaxspec.evaluation.benchmarks.draft_heads import HeadKind, head_shapes_for
from jaxspec.evaluation.benchmarks.random_quantized import QUANTIZED, random_quantized
from jaxspec.models.decoder import Decoder, decoder_shapes
from jaxspec.models.heads import BlockHead, DraftHead
from jaxspec.models.linear import AnyLinear, Linear
from jaxspec.models.mlps.expert_linear import ExpertLinear
from jaxspec.models.mlps.experts import Experts
from jaxspec.models.nodes import map_nodes, nodes_of
from jaxspec.models.pipeline_cut import Pipeline, pipeline_shapes
from jaxspec.models.pipeline_stage import Stage
from jaxspec.models.quantized.packed_experts import PackedExpertLinear, packed_experts_shape
from jaxspec.models.quantized.schemes import ROUNDINGS, in_scheme, rounded
from jaxspec.models.quantized.shared_among import way_of
from jaxspec.models.shapes import weight_name
from jaxspec.parallel import Shards, mesh_layout

# Standard deviation of the draft head's logits. Trained heads are confident of most tokens, so
# their trees grow deep. A flat distribution would use the node budget for the first two levels.
DRAFT_LOGIT_SCALE = 8.0
LEAST_OUTPUTS = 128  # of a projection that is published in 8 bits: a block


def random_decoder(
    config: ModelConfig,
    dtype: jnp.dtype,
    mesh: Mesh | None,
    seed: int,
    quantization: Scheme | None = None,
    lm_head_quantization: Scheme | None = None,
    expert_format: ExpertFormat | None = None,
) -> Decoder:
    """A model of random weights, sharded over the mesh's model axis if there is a mesh.

    ``quantization``: of all but the LM head and experts; see models/quantized/schemes.py.
    ``expert_format``: of experts; None: as the rest.

    Raises ValueError if ``lm_head_quantization`` is given and the LM head is the embedding table.
    """
    shapes = decoder_shapes(config, dtype, Shards.over(mesh, mesh_layout(mesh)))
    shapes = with_packed_experts(shapes, expert_format)
    shapes = decoder_in_schemes(shapes, quantization, lm_head_quantization, mesh)
    decoder = _random_tree(shapes, mesh, jax.random.key(seed, impl="rbg"))
    return with_random_tables(decoder, seed)


def decoder_in_schemes(
    decoder: Decoder,
    quantization: Scheme | None,
    lm_head_quantization: Scheme | None,
    mesh: Mesh | None,
) -> Decoder:
    """A decoder of ShapeDtypeStructs with its layers in one scheme, and its LM head in another.

    ``mesh``: of its devices; experts that are split have the shared one beside them.

    Raises ValueError as ``random_decoder``.
    """
    if quantization is not None and nodes_of(decoder, PackedExpertLinear):
        made = rounded(
            decoder, functools.partial(_rounded_as_published, quantization), lm_head=False
        )
        if mesh is None:
            made = map_nodes(made, _with_shared_among, Experts)
    else:
        made = in_scheme(decoder, quantization, lm_head=False)
    if lm_head_quantization is None:
        return made
    if made.lm_head is None:
        raise ValueError("the LM head is the embedding table: leave out --lm-head-quantization")
    return made.replace(lm_head=in_scheme(made.lm_head, lm_head_quantization, lm_head=True))


def _rounded_as_published(quantization: Scheme, linear: Linear) -> AnyLinear:
    """A Linear in a scheme, if files have it so: not routers, gates and others of few outputs."""
    is_small = math.prod(linear.out_shape) < LEAST_OUTPUTS
    return linear if is_small or "routes" in linear.axes else ROUNDINGS[quantization](linear)


def with_random_tables(decoder: Decoder, seed: int) -> Decoder:
    """A decoder whose layers with experts of token ids have other ones for each id: numbers that
    are made as weights are round to 0."""

    def changed(experts: Experts) -> Experts:
        if experts.of_tokens is None:
            return experts
        ids, most = experts.of_tokens.shape
        count, place = experts.config.routing.num_experts, experts.of_tokens.sharding

        def made() -> Array:
            numbers = jax.random.uniform(jax.random.key(seed), (ids, count))
            return jax.lax.top_k(numbers, most)[1].astype(jnp.int32)

        return experts.replace(of_tokens=jax.jit(made, out_shardings=place)())

    return map_nodes(decoder, changed, Experts)


def _with_shared_among(experts: Experts) -> Experts:
    """Experts of ShapeDtypeStructs, as loaders put the shared one among them."""
    way = way_of(experts)
    return experts if way is None else jax.eval_shape(way, experts)


def with_packed_experts[Weights](weights: Weights, expert_format: ExpertFormat | None) -> Weights:
    """Weights of ShapeDtypeStructs with their experts in a format.

    Raises ValueError if there are no experts.
    """
    if expert_format is None:
        return weights
    if not nodes_of(weights, ExpertLinear):
        raise ValueError("there are no experts: leave out --expert-format")
    return map_nodes(
        weights, lambda linear: packed_experts_shape(linear, expert_format), ExpertLinear
    )


def random_pipeline(
    config: ModelConfig,
    dtype: jnp.dtype,
    meshes: Sequence[Mesh],
    layers: Sequence[int],
    seed: int,
) -> Pipeline:
    """A random model as a pipeline of so many layers on each mesh."""
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(meshes))
    shapes = pipeline_shapes(config, dtype, meshes, layers)
    stages = [_random_tree(*job) for job in zip(shapes.stages, meshes[:-1], keys[:-1], strict=True)]
    return Pipeline(tuple(stages), _random_tree(shapes.last, meshes[-1], keys[-1]))


def random_draft_head(
    target: ModelConfig, dtype: jnp.dtype, mesh: Mesh | None, seed: int
) -> DraftHead:
    """``random_head`` of the kind "auto"."""
    head = random_head(target, dtype, mesh, seed)
    assert isinstance(head, DraftHead)
    return head


def random_head(
    target: ModelConfig,
    dtype: jnp.dtype,
    mesh: Mesh | None,
    seed: int,
    *,
    kind: HeadKind = "auto",
    quantization: Scheme | None = None,
    expert_format: ExpertFormat | None = None,
) -> DraftHead | BlockHead:
    """``head_shapes_for`` with random weights (see draft_heads.py)."""
    shapes = head_shapes_for(target, dtype, mesh, kind=kind, quantization=quantization)
    if nodes_of(shapes, ExpertLinear):
        shapes = with_packed_experts(shapes, expert_format)
    weights_key, ids_key = jax.random.split(jax.random.key(seed, impl="rbg"))
    if isinstance(shapes, BlockHead):
        return _random_tree(shapes, mesh, weights_key)
    head = _random_tree(shapes.replace(token_ids=None), mesh, weights_key)
    if shapes.token_ids is None:
        return head
    vocab = shapes.token_ids.shape[0]
    ids = jnp.sort(jax.random.permutation(ids_key, target.vocab_size)[:vocab]).astype(jnp.int32)
    if mesh is not None:
        ids = jax.device_put(ids, NamedSharding(mesh, P()))
    return head.replace(token_ids=ids)


def _random_tree[T: Decoder | DraftHead | BlockHead | Stage](
    shapes: T, mesh: Mesh | None, key: Array
) -> T:
    """The tree with every ShapeDtypeStruct replaced by an array of random values."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes, _is_quantized)
    places = jax.tree.leaves(placements(shapes, mesh), is_leaf=_is_quantized)
    arrays, is_draft = [], isinstance(shapes, DraftHead)
    of_experts = {id(linear.weight) for linear in nodes_of(shapes, ExpertLinear)}
    for index, ((path, leaf), place) in enumerate(zip(leaves, places, strict=True)):
        leaf_key, name = jax.random.fold_in(key, index), weight_name(path)
        if isinstance(leaf, QUANTIZED):
            _, spread = _distribution(name, leaf.values.shape[::-1], is_draft)
            arrays.append(random_quantized(leaf, place, leaf_key, spread))
        else:
            matrix_shape = leaf.shape[1:] if id(leaf) in of_experts else leaf.shape
            center, spread = _distribution(name, matrix_shape, is_draft)
            arrays.append(_generator(leaf.shape, leaf.dtype, center, spread, place)(leaf_key))
    return jax.tree.unflatten(structure, arrays)


def _is_quantized(node: Any) -> bool:
    return isinstance(node, QUANTIZED)


def _distribution(name: str, shape: tuple[int, ...], is_draft: bool) -> tuple[float, float]:
    """Mean and standard deviation that keep activations and logits in a model's usual range."""
    if "norm" in name:
        return 1.0, 0.1
    fan_in = shape[1] if name == "embed" else shape[0]
    scale = DRAFT_LOGIT_SCALE if is_draft and name == "lm_head" else 1.0
    return 0.0, scale * fan_in**-0.5


@functools.cache
def _generator(
    shape: tuple[int, ...], dtype: jnp.dtype, center: float, spread: float, place: Any
) -> Any:
    """A compiled function from a key to an array of uniform values.

    Each value comes from 16 random bits, read as an integer, so there are no float32 temporaries.
    """
    *lead, size = shape
    step = spread * 3**0.5 / 2**15

    def generate(key: Array) -> Array:
        words = jax.random.bits(key, (*lead, -(-size // 2)), jnp.uint32)
        integers = jax.lax.bitcast_convert_type(words, jnp.int16)  # [..., size / 2, 2]
        integers = integers.reshape(*lead, -1)[..., :size]
        return integers.astype(dtype) * jnp.asarray(step, dtype) + jnp.asarray(center, dtype)

    return jax.jit(generate, out_shardings=place)
