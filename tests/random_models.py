"""Tiny random targets and drafters, and a generation loop over them.

The target is nearly a bigram model: its layers change the residual stream only a little. So a
drafter can guess it without training: a noisy copy of it, or a head built to hand the token's own
embedding to the target's LM head. Both are right often, but not always.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.cache import pages_for
from jaxspec.config import ModelConfig, SpeculationConfig
from jaxspec.functional import EngineParams, decode, init_state, prefill
from jaxspec.models.decoder import Decoder, decoder_shapes
from jaxspec.models.eagle import EagleHead, head_shapes
from jaxspec.sampling import Sampling
from jaxspec.speculation.drafters import (
    Drafter,
    DraftModelDrafter,
    EagleDrafter,
    NGramDrafter,
    NoDrafter,
)
from jaxspec.state import EngineState

CONFIG = ModelConfig(
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
    sliding_windows=(None, None),
)
DRAFTERS = ("ngram", "draft_model", "eagle3", "eagle1")
PREFILL_WIDTH, NEW_TOKENS = 32, 256
MAX_LENGTH = PREFILL_WIDTH + NEW_TOKENS
ALL_ROUNDS = 1_000_000

jit_prefill, jit_decode = jax.jit(prefill), jax.jit(decode)


def random_arrays(shapes: Any, seed: int) -> Any:
    """Arrays for a tree of ShapeDtypeStructs: matrices keep a vector's size, norms are near 1."""
    rng = np.random.default_rng(seed)

    def fill(leaf: jax.ShapeDtypeStruct) -> Array:
        noise = rng.standard_normal(leaf.shape)
        values = 1 + 0.1 * noise if len(leaf.shape) == 1 else noise / math.sqrt(leaf.shape[0])
        return jnp.asarray(values, leaf.dtype)

    return jax.tree.map(fill, shapes)


def random_target(
    config: ModelConfig = CONFIG, seed: int = 0, *, sharpness: float = 4.0, context: float = 0.3
) -> Decoder:
    """``sharpness`` is the logits' standard deviation, ``context`` the weight of the layers."""
    model = random_arrays(decoder_shapes(config, jnp.dtype(jnp.float32)), seed)
    assert model.lm_head is not None
    return dataclasses.replace(
        model,
        embed=model.embed * math.sqrt(config.vocab_size),
        layers=tuple(
            dataclasses.replace(layer, o=context * layer.o, down=context * layer.down)
            for layer in model.layers
        ),
        lm_head=sharpness * model.lm_head,
    )


def noisy[T](model: T, noise: float, seed: int = 1) -> T:
    """A copy whose every float array is off by ``noise`` times its own standard deviation."""
    rng = np.random.default_rng(seed)

    def perturb(leaf: Array) -> Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        values = np.asarray(leaf)
        noisy_values = values + noise * values.std() * rng.standard_normal(leaf.shape)
        return jnp.asarray(noisy_values, leaf.dtype)

    return jax.tree.map(perturb, model)


def draft_model(target: Decoder, noise: float = 0.1) -> Decoder:
    """The target's first layer alone, with noise."""
    config = dataclasses.replace(
        target.config, num_layers=1, sliding_windows=target.config.sliding_windows[:1]
    )
    return noisy(dataclasses.replace(target, layers=target.layers[:1], config=config), noise)


def eagle1_head(target: Decoder, noise: float = 0.1, seed: int = 2) -> EagleHead:
    """``fc`` passes the embedding on; the layer adds a little."""
    config = _head_config(target)
    shapes = head_shapes(config, "eagle1", target.config, jnp.dtype(jnp.float32), fc_bias=True)
    head, hidden = random_arrays(shapes, seed), config.hidden_size
    fc = jnp.concatenate([jnp.eye(hidden), jnp.zeros((hidden, hidden))])
    head = dataclasses.replace(head, fc=fc, fc_bias=jnp.zeros(hidden))
    return noisy(_quiet(head, attention=0.1), noise)


def eagle3_head(
    target: Decoder, draft_vocab_size: int | None = 64, noise: float = 0.1, seed: int = 3
) -> EagleHead:
    """Every entry attends to itself alone, and its values are its embedding.

    Constant queries and keys (biases) turn into a preference for the nearest position by rope.
    """
    config = dataclasses.replace(_head_config(target), qkv_bias=True)
    hidden, vocab = config.hidden_size, draft_vocab_size or config.vocab_size
    shapes = head_shapes(
        config,
        "eagle3",
        target.config,
        jnp.dtype(jnp.float32),
        draft_vocab_size=draft_vocab_size,
        capture=(0, 1, 2),
    )
    head = random_arrays(shapes, seed)
    layer, groups, head_dim = head.layers[0], config.num_kv_heads, config.head_dim
    assert groups * head_dim == hidden and target.lm_head is not None
    values = jnp.eye(2 * hidden, hidden).reshape(2 * hidden, groups, head_dim)
    copies = jnp.eye(hidden).reshape(groups, 1, head_dim, hidden)
    per_group = config.num_heads // groups
    layer = dataclasses.replace(
        layer,
        qkv=jnp.zeros_like(layer.qkv).at[:, :, -1].set(values),
        qkv_bias=jnp.zeros_like(layer.qkv_bias).at[:, :-1].set(5.0),
        o=jnp.repeat(copies, per_group, axis=1).reshape(-1, hidden) / per_group,
    )
    ids = np.random.default_rng(seed).permutation(config.vocab_size)[:vocab]
    head = dataclasses.replace(
        head,
        fc=0.1 * head.fc,
        layers=(layer,),
        lm_head=target.lm_head[:, ids if draft_vocab_size else slice(None)],
        token_ids=jnp.asarray(ids, jnp.int32) if draft_vocab_size else None,
    )
    return noisy(_quiet(head), noise)


def _head_config(target: Decoder) -> ModelConfig:
    return dataclasses.replace(target.config, num_layers=1, sliding_windows=(None,))


def _quiet(head: EagleHead, attention: float = 1.0) -> EagleHead:
    (layer,) = head.layers
    layer = dataclasses.replace(layer, o=attention * layer.o, down=0.1 * layer.down)
    return dataclasses.replace(head, layers=(layer,))


def make_drafter(name: str, target: Decoder, spec: SpeculationConfig) -> Drafter:
    """One of DRAFTERS, or "none"."""
    if name == "none":
        return NoDrafter()
    if name == "ngram":
        return NGramDrafter(speculation=spec)
    if name == "draft_model":
        return DraftModelDrafter(model=draft_model(target), speculation=spec)
    head = eagle3_head(target) if name == "eagle3" else eagle1_head(target)
    features = len(head.capture) * target.config.hidden_size
    return EagleDrafter(head=head, feature_size=features, speculation=spec)


def make_params(name: str, spec: SpeculationConfig, target: Decoder | None = None) -> EngineParams:
    target = random_target() if target is None else target
    return EngineParams(target=target, drafter=make_drafter(name, target, spec), speculation=spec)


def random_prompts(lengths: tuple[int, ...], seed: int = 0, vocab: int = 96) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(vocab, size=length).astype(np.int32) for length in lengths]


def empty_state(
    params: EngineParams, batch: int, max_length: int, page_size: int = 16, **options: Any
) -> EngineState:
    """init_state, but with each sequence's pages scattered over the pool."""
    columns = pages_for(max_length + params.speculation.scratch_slots, page_size)
    pages = 1 + np.random.default_rng(7).permutation(batch * columns)
    table = jnp.asarray(pages.reshape(batch, columns), jnp.int32)
    return init_state(
        params,
        batch,
        max_length,
        page_size=page_size,
        page_table=table,
        num_pages=1 + batch * columns,
        **options,
    )


def read_prompts(
    params: EngineParams, state: EngineState, prompts: list[np.ndarray], chunk: int = PREFILL_WIDTH
) -> EngineState:
    """Prefill, at most ``chunk`` tokens of each prompt a call."""
    for start in range(0, max(map(len, prompts)), chunk):
        pieces = [prompt[start : start + chunk] for prompt in prompts]
        tokens = np.zeros((len(pieces), PREFILL_WIDTH), np.int32)
        for row, piece in zip(tokens, pieces, strict=True):
            row[: len(piece)] = piece
        counts = jnp.asarray([len(piece) for piece in pieces], jnp.int32)
        state = jit_prefill(params, state, jnp.asarray(tokens), counts)
    return state


def texts(state: EngineState) -> list[list[int]]:
    """Each sequence's tokens, prompt and root included."""
    rows, lengths = np.asarray(state.tokens), np.asarray(state.context_lens) + 1
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
) -> tuple[list[list[int]], EngineState]:
    """Texts of NEW_TOKENS new tokens each, unless a limit cuts them, and the final state."""
    limits = max_lens or [len(prompt) + NEW_TOKENS for prompt in prompts]
    state = empty_state(
        params,
        len(prompts),
        MAX_LENGTH,
        page_size,
        sampling=sampling,
        max_lens=jnp.asarray(limits, jnp.int32),
        stop_token_ids=stop_token_ids,
    )
    state = jit_decode(params, read_prompts(params, state, prompts, chunk), ALL_ROUNDS)
    return texts(state), state
