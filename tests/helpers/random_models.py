"""Tiny random targets and drafters, and a generation loop over them.

The target is nearly a bigram model: its layers change the residual stream only a little. So a
drafter can guess it without training: a noisy copy of it, or a head built to hand the token's own
embedding to the target's LM head. Both are right often, but not always.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.checkpoints.safetensors_io import save_decoder
from jaxspec.config.cache import pages_for
from jaxspec.config.experts import SquaredRelu
from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.mlps import dense_like
from jaxspec.config.model import LayerConfig, ModelConfig, dense_model
from jaxspec.config.mtp import AFTER, MtpConfig, MtpLayout, MtpStates
from jaxspec.config.speculation import SpeculationConfig, TreeShape
from jaxspec.decoding.drafters import (
    Drafter,
    DraftModelDrafter,
    EagleDrafter,
    MixedDrafter,
    NGramDrafter,
    NoDrafter,
    ParallelEagleDrafter,
    SuffixDrafter,
)
from jaxspec.decoding.sampling import Sampling, make_sampling
from jaxspec.decoding.state import EngineState, Status
from jaxspec.engine.programs.xla_options import DETERMINISTIC
from jaxspec.functional import EngineParams, admit, decode, init_state, prefill
from jaxspec.models.decoder import FINAL_NORM, Decoder, decoder_shapes
from jaxspec.models.gated_streams import Gates
from jaxspec.models.heads import (
    DraftHead,
    HeadConfig,
    MaskEntry,
    StreamsMtpFront,
    head_shapes,
    mtp_head_config,
)
from jaxspec.models.linear import Linear
from jaxspec.models.mixers import BlockSparseAttention, IndexedAttention, SideBySide
from jaxspec.models.mlps import Dense, Experts, Xielu
from jaxspec.models.nodes import map_nodes
from tests.helpers.programs import FAST_COMPILE


def tiny_config(**changes: Any) -> ModelConfig:
    """A model of a few thousand weights; ``changes`` are dense_model's arguments."""
    sizes: dict[str, Any] = dict(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_position=1024,
    )
    return dense_model(**sizes | changes)


CONFIG = tiny_config()
DRAFTERS = ("ngram", "draft_model", "eagle3", "eagle1", "mixed")
PREFILL_WIDTH, NEW_TOKENS = 32, 160
MAX_LENGTH = PREFILL_WIDTH + NEW_TOKENS

_CHOICES = ("greedy", "controls", "logprobs", "top_logprobs", "prompt_logprobs", "hidden")
_SIZES = ("num_rows", "max_length", "page_size", "num_pages", "max_stops", "controls")
jit_init = jax.jit(init_state, static_argnames=_SIZES)  # within programs, too
jit_admit = jax.jit(admit, compiler_options=FAST_COMPILE)


def _programs(options: Any) -> tuple[Any, Any]:
    """``prefill`` and ``decode``, compiled with options of XLA."""
    emitting = tuple(name for name in _CHOICES if "prompt" not in name)
    jit = functools.partial(jax.jit, compiler_options=options)
    return (
        jit(prefill, static_argnames=("width", *_CHOICES)),
        jit(decode, static_argnames=("max_rounds", "shape", *emitting)),
    )


jit_prefill, jit_decode = _programs(FAST_COMPILE)
# As engines compile programs of a fixed width.
_fixed_prefill, _fixed_decode = _programs({**FAST_COMPILE, **DETERMINISTIC})


def as_dtype(values: np.ndarray, dtype: Any) -> Array:
    """Rounded as jnp.asarray rounds doubles, but by NumPy: of jax each shape would be a program."""
    return jax.device_put(values.astype(np.float32).astype(dtype))


def random_arrays(shapes: Any, seed: int) -> Any:
    """Arrays for a tree of ShapeDtypeStructs: matrices keep a vector's size, norms are near 1."""
    rng = np.random.default_rng(seed)

    def near_one(norm: Array) -> Array:
        return as_dtype(1 + 0.1 * rng.standard_normal(norm.shape), norm.dtype)

    def normed(gates: Any) -> Any:  # of several streams: a matrix
        return gates.replace(norm=near_one(gates.norm))

    def fill(leaf: jax.ShapeDtypeStruct) -> Array:
        noise = rng.standard_normal(leaf.shape)
        values = 1 + 0.1 * noise if len(leaf.shape) == 1 else noise / math.sqrt(leaf.shape[0])
        return as_dtype(values, leaf.dtype)

    return map_nodes(jax.tree.map(fill, shapes), normed, Gates)


def random_target(
    config: ModelConfig = CONFIG, seed: int = 0, *, sharpness: float = 4.0, context: float = 0.3
) -> Decoder:
    """``sharpness`` is the logits' standard deviation, ``context`` the weight of the layers."""
    model = random_arrays(decoder_shapes(config, jnp.dtype(jnp.float32)), seed)
    assert model.lm_head is not None
    return model.replace(
        embed=times(math.sqrt(config.vocab_size), model.embed),
        layers=tuple(_quieted(layer, context, context) for layer in model.layers),
        lm_head=scaled(model.lm_head, sharpness),
    )


def save_random_target(directory: Path, **changes: Any) -> Path:
    """A checkpoint of a random target of one layer, made without torch."""
    sizes = {"num_layers": 1} | changes
    save_decoder(random_target(tiny_config(**sizes)), directory)
    return directory


def times(factor: float, x: Array) -> Array:
    """Computed by numpy, as all of these weights are: of jax each shape would be a program."""
    return jax.device_put((factor * np.asarray(x)).astype(x.dtype))


def scaled(linear: Linear, factor: float) -> Linear:
    return linear.replace(weight=times(factor, linear.weight))


def _quieted[T](layer: T, mixer: float, mlp: float) -> T:
    """A Layer whose blocks add less to the residual stream."""
    layer_: Any = layer

    def quiet(mixer_: Any) -> Any:
        if isinstance(mixer_, SideBySide):
            return mixer_.replace(first=quiet(mixer_.first), second=quiet(mixer_.second))
        if isinstance(mixer_, BlockSparseAttention | IndexedAttention):
            return mixer_.replace(attention=quiet(mixer_.attention))
        return mixer_.replace(o=scaled(mixer_.o, mixer))

    def quieted(node: Any) -> Any:
        return node.replace(down=scaled(node.down, mlp))

    mlp_, shared = layer_.mlp, getattr(layer_.mlp, "shared", None)
    if shared is not None and isinstance(shared.config.activation, SquaredRelu):  # it gives more
        shared = shared.replace(down=scaled(shared.down, mlp))
        mlp_ = mlp_.replace(shared=shared)
    ngrams = layer_.ngrams and layer_.ngrams.replace(taps=times(mixer, layer_.ngrams.taps))
    return layer_.replace(
        ngrams=ngrams,
        mixer=layer_.mixer and quiet(layer_.mixer),
        mlp=mlp_ and map_nodes(mlp_, quieted, Dense, Experts, Xielu),
    )


def noisy[T](model: T, noise: float, seed: int = 1) -> T:
    """A copy whose every float array is off by ``noise`` times its own standard deviation."""
    rng = np.random.default_rng(seed)

    def perturb(leaf: Array) -> Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        values = np.asarray(leaf)
        noisy_values = values + noise * values.std() * rng.standard_normal(leaf.shape)
        return as_dtype(noisy_values, leaf.dtype)

    return jax.tree.map(perturb, model)


def draft_model(target: Decoder, noise: float = 0.1) -> Decoder:
    """The target's first layer alone, with noise."""
    config = dataclasses.replace(target.config, layers=target.config.layers[:1])
    return noisy(target.replace(layers=target.layers[:1], config=config), noise)


def eagle1_head(target: Decoder, noise: float = 0.1, seed: int = 2) -> DraftHead:
    """``fc`` passes the embedding on; the layer adds a little."""
    config = _head_config(target)
    described = HeadConfig(config, "eagle1", (FINAL_NORM,), fc_bias=True)
    shapes = head_shapes(described, target.config, jnp.dtype(jnp.float32))
    head, hidden = random_arrays(shapes, seed), config.hidden_size
    weight = np.eye(2 * hidden, hidden, dtype=np.float32)
    fc = head.front.fc.replace(weight=weight, bias=np.zeros(hidden, np.float32))
    layers = (_quieted(head.layers[0], 0.1, 0.1),)
    return noisy(head.replace(front=head.front.replace(fc=fc), layers=layers), noise)


def mtp_head(
    target: Decoder,
    noise: float = 0.1,
    seed: int = 4,
    *,
    states: MtpStates = AFTER,
    layout: MtpLayout = "deepseek",
    index: int = 0,
    mixing: float = 0.0,
    context: float = 0.1,
) -> DraftHead:
    """``fc`` passes the embedding on, and ``mixing`` times a random product of the hidden state;
    ``context`` is the weight of the layer, ``index`` its place among several."""
    layers = target.config.mtp.layers if target.config.mtp else ()
    described = mtp_head_config(target.config, MtpConfig(layout, 1 + index, states, layers), index)
    shapes = head_shapes(described, target.config, jnp.dtype(jnp.float32))
    head, hidden = random_arrays(shapes, seed), target.config.hidden_size
    if isinstance(head.front, StreamsMtpFront):
        fc = head.front.fc.replace(weight=np.eye(hidden, dtype=np.float32))
        front = head.front.replace(fc=fc, hidden_fc=scaled(head.front.hidden_fc, mixing))
        return noisy(
            head.replace(front=front, layers=(_quieted(head.layers[0], context, context),)), noise
        )
    halves = [np.eye(hidden, dtype=np.float32), mixing * np.asarray(head.front.fc.weight)[hidden:]]
    if described.mtp is not None and described.mtp.hidden_first:
        halves.reverse()
    fc = head.front.fc.replace(weight=np.concatenate(halves))
    layers = (_quieted(head.layers[0], context, context),)
    return noisy(head.replace(front=head.front.replace(fc=fc), layers=layers), noise)


def mtp_drafter(target: Decoder, count: int, **options: Any) -> EagleDrafter:
    """A head for each of the first ``count`` steps, which depends on hidden states and context."""
    options = {"mixing": 1.0, "context": 0.5} | options
    head, *later = (mtp_head(target, seed=4 + j, **options) for j in range(count))
    return EagleDrafter(head=head, later=tuple(later))


def eagle3_head(
    target: Decoder, draft_vocab_size: int | None = 64, noise: float = 0.1, seed: int = 3
) -> DraftHead:
    """Every entry attends to itself alone, and its values are its embedding.

    Constant queries and keys (biases) turn into a preference for the nearest position by rope.
    Its attention is the target's, if the values of that have room for an embedding, else CONFIG's.
    """
    config = _head_config(target, qkv_bias=True)
    own = config.layers[0].attention
    if own.num_kv_heads * own.head_dim != config.hidden_size:
        mixer = dataclasses.replace(CONFIG.layers[0].attention, qkv_bias=True)
        config = config.map_layers(lambda layer: dataclasses.replace(layer, mixer=mixer))
    hidden, vocab = config.hidden_size, draft_vocab_size or config.vocab_size
    described = HeadConfig(config, "eagle3", (0, 1, 2), draft_vocab_size)
    shapes = head_shapes(described, target.config, jnp.dtype(jnp.float32))
    head = random_arrays(shapes, seed)
    layer, attention = head.layers[0], config.layers[0].attention
    groups, head_dim = attention.num_kv_heads, attention.head_dim
    assert groups * head_dim == hidden and target.lm_head is not None
    values = np.eye(2 * hidden, hidden, dtype=np.float32).reshape(2 * hidden, groups, head_dim)
    copies = np.eye(hidden, dtype=np.float32).reshape(groups, 1, head_dim, hidden)
    per_group = attention.num_heads // groups
    qkv = layer.mixer.qkv
    weight, bias = np.zeros(qkv.weight.shape, np.float32), np.zeros(qkv.bias.shape, np.float32)
    weight[:, :, -1], bias[:, :-1] = values, 5.0
    mixer = layer.mixer.replace(
        qkv=qkv.replace(weight=weight, bias=bias),
        o=layer.mixer.o.replace(
            weight=np.repeat(copies, per_group, axis=1).reshape(-1, hidden) / per_group
        ),
    )
    ids = np.random.default_rng(seed).permutation(config.vocab_size)[:vocab]
    own = np.asarray(target.lm_head.weight)[:, ids if draft_vocab_size else slice(None)]
    head = head.replace(
        front=head.front.replace(fc=scaled(head.front.fc, 0.1)),
        layers=(_quieted(layer.replace(mixer=mixer), 1.0, 0.1),),
        lm_head=target.lm_head.replace(weight=own),
        token_ids=jnp.asarray(ids, jnp.int32) if draft_vocab_size else None,
    )
    return noisy(head, noise)


def _head_config(target: Decoder, **changes: Any) -> ModelConfig:
    """One layer like the target's first, without a window; one of CONFIG's attention for a target
    that begins with a mixer of another kind."""
    first = target.config.layers[0]
    alike = first if isinstance(first.mixer, AttentionConfig) else CONFIG.layers[0]
    mixer = dataclasses.replace(alike.attention, window=None, sinks=False, **changes)
    mlp: Any = first.mlp or CONFIG.layers[0].mlp
    layer = LayerConfig(mixer, dense_like(mlp))
    return dataclasses.replace(target.config, layers=(layer,))


def make_drafter(name: str, target: Decoder) -> Drafter:
    """One of DRAFTERS, "peagle", "mtp", "mtp3" (3 layers), "suffix" and "suffix mixed", "none"."""
    match name:
        case "none":
            return NoDrafter()
        case "ngram":
            return NGramDrafter()
        case "draft_model":
            return DraftModelDrafter(model=draft_model(target))
        case "mixed":
            lookup = NGramDrafter(min_match=2)  # found often, not always
            return MixedDrafter(model=make_drafter("eagle3", target), lookup=lookup)
        case "suffix":
            return SuffixDrafter()
        case "suffix mixed":
            lookup = SuffixDrafter(min_match=2)
            return MixedDrafter(model=make_drafter("eagle3", target), lookup=lookup)
        case "peagle":  # the first draft is often right, those of masks are not
            hidden = np.random.default_rng(4).standard_normal(3 * target.config.hidden_size)
            mask = MaskEntry(hidden=jnp.asarray(hidden, jnp.float32), token=95)
            return ParallelEagleDrafter(head=eagle3_head(target).replace(mask=mask))
        case "mtp":
            return EagleDrafter(head=mtp_head(target))
        case "mtp3":
            return mtp_drafter(target, 3, mixing=0.5, context=0.3)
        case _:
            return EagleDrafter(
                head=eagle3_head(target) if name == "eagle3" else eagle1_head(target)
            )


def make_params(name: str, spec: SpeculationConfig, target: Decoder | None = None) -> EngineParams:
    target = random_target() if target is None else target
    return EngineParams(target=target, drafter=make_drafter(name, target), speculation=spec)


def random_prompts(lengths: tuple[int, ...], seed: int = 0, vocab: int = 96) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(vocab, size=length).astype(np.int32) for length in lengths]


def empty_state(
    params: EngineParams, num_rows: int, max_length: int, page_size: int = 16, **options: Any
) -> EngineState:
    """init_state, but with each sequence's pages scattered over the pool."""
    columns = pages_for(max_length + params.speculation.scratch_slots, page_size)
    pages = 1 + np.random.default_rng(7).permutation(num_rows * columns)
    table = pages.reshape(num_rows, columns).astype(np.int32)
    # One program, not one for each array.
    init = jit_init if params.mesh is None else init_state
    return init(
        params,
        num_rows,
        max_length,
        page_size=page_size,
        page_table=table,
        num_pages=1 + num_rows * columns,
        **options,
    )


def padded(prompts: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Prompts side by side, zeros past each: int32 [B, width]."""
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens


def admit_prompts(
    params: EngineParams, state: EngineState, prompts: Sequence[np.ndarray], **options: Any
) -> EngineState:
    """Prompts in the first rows of a state; ``options`` are admit's."""
    tokens = padded(prompts, state.rows.tokens.shape[1])
    lens = np.array([len(prompt) for prompt in prompts], np.int32)
    return jit_admit(params, state, np.arange(len(prompts)), tokens, lens, **options)


def read_prompts(
    params: EngineParams, state: EngineState, chunk: int = PREFILL_WIDTH, **options: Any
) -> EngineState:
    """Prefill all rows that were admitted, at most ``chunk`` tokens of each a call."""
    counts = np.full(state.rows.status.shape, chunk, np.int32)
    read = jit_prefill if params.speculation.verify_width is None else _fixed_prefill
    while (np.asarray(state.rows.status) == Status.READING).any():
        state, _ = read(params, state, None, counts, width=PREFILL_WIDTH, **options)
    return state


def texts(state: EngineState) -> list[list[int]]:
    """Each sequence's tokens, prompt and root included."""
    rows, lengths = np.asarray(state.rows.tokens), np.asarray(state.rows.context_lens) + 1
    return [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]


def generate(
    params: EngineParams,
    prompts: list[np.ndarray],
    *,
    page_size: int = 16,
    sampling: Sampling | None = None,
    chunk: int = PREFILL_WIDTH,
    max_lens: list[int] | None = None,
    stop_token_ids: tuple[int, ...] = (),
    shape: TreeShape | None = None,
) -> tuple[list[list[int]], EngineState]:
    """Texts of NEW_TOKENS new tokens each, unless a limit cuts them, and the final state."""
    sampling = make_sampling(len(prompts)) if sampling is None else sampling
    greedy = not sampling.drawn.any()
    state = admit_prompts(
        params,
        empty_state(params, len(prompts), MAX_LENGTH, page_size),
        prompts,
        sampling=sampling,
        max_lens=np.array(max_lens or [len(prompt) + NEW_TOKENS for prompt in prompts], np.int32),
        stop_token_ids=stop_token_ids,
    )
    state = read_prompts(params, state, chunk, greedy=greedy)
    run = jit_decode if params.speculation.verify_width is None else _fixed_decode
    state, _ = run(params, state, NEW_TOKENS, max_rounds=NEW_TOKENS, shape=shape, greedy=greedy)
    return texts(state), state
