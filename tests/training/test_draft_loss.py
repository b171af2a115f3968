"""The unrolled loss: what a head sees in training is what it sees when it drafts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxspec.cache import Geometry
from jaxspec.config.mixers import AttentionConfig
from jaxspec.models.attention import PagedAttend, dense_causal_attend
from jaxspec.models.decoder import Decoder
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.heads import (
    DraftHead,
    EagleMethod,
    HeadConfig,
    default_capture,
    head_shapes,
)
from jaxspec.training.heads.loss import DraftBatch, LossConfig, target_states, unroll
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_experts import random_expert_target
from tests.helpers.random_models import CONFIG, mtp_head, random_arrays, random_target, tiny_config

TARGET = random_target()
assert TARGET.lm_head is not None
LM_HEAD = TARGET.lm_head.weight
LENGTH, STEPS, PAGE = 14, 4, 4
TOKENS = np.random.default_rng(0).integers(CONFIG.vocab_size, size=(2, LENGTH)).astype(np.int32)


@functools.partial(jax.jit, static_argnums=3, compiler_options=FAST_COMPILE)
def jit_loss(head: DraftHead, target: Decoder, batch: DraftBatch, config: LossConfig):
    return config(head, target, batch)


jit_states = jax.jit(target_states, static_argnums=(2, 3), compiler_options=FAST_COMPILE)


def random_head(
    method: EagleMethod, num_layers: int = 1, window: int | None = None, **options: Any
):
    config = tiny_config(num_layers=num_layers, sliding_windows=(window,) * num_layers)
    capture = options.pop("capture", default_capture(method, CONFIG.num_layers))
    described = HeadConfig(config, method, capture, **options)
    shapes = head_shapes(described, CONFIG, jnp.dtype(jnp.float32))
    if shapes.token_ids is None:
        return random_arrays(shapes, 5)
    ids = np.sort(np.random.default_rng(5).permutation(CONFIG.vocab_size)[: len_of(shapes)])
    head = random_arrays(shapes.replace(token_ids=None), 5)
    return head.replace(token_ids=jnp.asarray(ids, jnp.int32))


def len_of(head: DraftHead) -> int:
    assert head.token_ids is not None
    return head.token_ids.shape[0]


def batch_of(tokens: np.ndarray, learned: np.ndarray | None = None) -> DraftBatch:
    marks = np.ones(tokens.shape, bool) if learned is None else learned
    return DraftBatch(tokens=jnp.asarray(tokens), learned=jnp.asarray(marks))


def features_of(head: DraftHead, target: Decoder = TARGET):
    return jit_states(target, batch_of(TOKENS), head.capture, dense_causal_attend)[0]


@functools.partial(jax.jit, compiler_options=FAST_COMPILE)
def read(
    target: Decoder,
    head: DraftHead,
    first: jax.Array,
    tokens: jax.Array,
    hidden: jax.Array,
    layers: Any,
) -> tuple[jax.Array, Any]:
    """One pass over tokens from slot ``first`` on, through a paged cache."""
    table = 1 + jnp.arange(2 * LENGTH).reshape(2, LENGTH)
    slot = jnp.broadcast_to(first + jnp.arange(hidden.shape[1]), hidden.shape[:2])
    page = jnp.take_along_axis(table, slot // PAGE, axis=1)
    attend = PagedAttend(
        rows=jnp.arange(2),
        page_table=table,
        context_lens=slot[:, 0],
        slots=page * PAGE + slot % PAGE,
        positions=slot,
        kv_lens=slot[:, -1] + 1,
        first_slot=1,
    )
    out = head.run(target, tokens, hidden, slot - 1, layers, attend)
    return out.hidden, out.states


def drafted(
    head: DraftHead, features: jax.Array, root: int, target: Decoder = TARGET
) -> list[np.ndarray]:
    """The head's outputs [B, H] when it drafts after the true tokens up to ``root``, as served:
    through a paged cache, one token at a time."""
    layers = head.init_state(Geometry(1 + 2 * LENGTH, PAGE, 2)).layers
    hidden = head.hidden(jax.device_put(np.asarray(features)[:, :root]))
    outputs, layers = read(target, head, np.int32(1), TOKENS[:, 1 : root + 1], hidden, layers)
    results = [np.asarray(outputs)[:, -1]]
    for position in range(root + 1, min(root + STEPS, LENGTH)):
        token = TOKENS[:, position : position + 1]
        entry = np.int32(position), token, results[-1][:, None]
        outputs, layers = read(target, head, *entry, layers)
        results.append(np.asarray(outputs)[:, 0])
    return results


@pytest.mark.parametrize(
    ("method", "num_layers", "window", "options"),
    [
        *(slow("eagle3", *shape, {}) for shape in ((1, None), (2, None))),
        *(slow("eagle1", *shape, {}) for shape in ((1, None), (1, 5))),
        slow("eagle3", 1, 5, {}),
        slow("eagle1", 2, None, {}),
        ("eagle3", 1, None, {"fc_norm": True, "norm_output": True}),
        slow("eagle3", 1, None, {"norm_before_fc": True, "norm_before_residual": True}),
        slow("eagle3", 1, None, {"capture": (1,)}),
    ],
)
def test_a_step_of_training_is_a_step_of_drafting(method, num_layers, window, options):
    head = random_head(method, num_layers, window, **options)
    features = features_of(head)
    unrolled = jax.jit(unroll, static_argnums=4, compiler_options=FAST_COMPILE)
    steps = jax.device_get(unrolled(head, TARGET, TOKENS, features, STEPS))
    for root in (1, 7, LENGTH - 2):
        for index, outputs in enumerate(drafted(head, features, root)):
            np.testing.assert_allclose(steps[index][0][:, root + index], outputs, atol=1e-4, rtol=0)


OWN_SCORES: dict[str, dict[str, Any]] = {
    "gemma2": {
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 4,
        "sliding_window": 64,
    },
    "gpt_oss": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 5,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}


@functools.cache
def target_of(family: str) -> Decoder:
    """A random model of a family whose scores are capped, or have sinks."""
    sizes = ("vocab_size", "hidden_size", "rms_norm_eps")
    raw: dict[str, Any] = {name: getattr(CONFIG, name) for name in sizes} | {
        "model_type": family,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "eos_token_id": None,
    }
    return random_expert_target(parse_model_config(raw | OWN_SCORES[family]))


def with_mixer(head: DraftHead, mixer: Any) -> DraftHead:
    """The head with another mixer in its only layer."""
    [layer] = head.layers
    return head.replace(layers=(layer.replace(mixer=mixer),))


def without_own_scores(head: DraftHead) -> DraftHead:
    """The same layer with plain softmax attention."""
    mixer: Any = head.layers[0].mixer
    config = dataclasses.replace(mixer.config, softcap=None, sinks=False)
    return with_mixer(head, mixer.replace(config=config, sinks=None))


@pytest.mark.slow
@pytest.mark.parametrize("family", OWN_SCORES)
def test_capped_scores_and_sinks_are_those_of_drafting(family: str):
    target = target_of(family)
    head = mtp_head(target, mixing=1.0, context=1.0)
    own = head.config.layers[0].mixer
    assert isinstance(own, AttentionConfig) and (own.softcap or own.sinks)
    features = features_of(head, target)
    unrolled = jax.jit(unroll, static_argnums=4, compiler_options=FAST_COMPILE)
    steps = unrolled(head, target, TOKENS, features, STEPS)
    for root in (1, 7, LENGTH - 2):
        for index, outputs in enumerate(drafted(head, features, root, target)):
            np.testing.assert_allclose(steps[index][0][:, root + index], outputs, atol=1e-4, rtol=0)
    plain = unrolled(without_own_scores(head), target, TOKENS, features, STEPS)
    for (hidden, _), (other, _) in zip(steps, plain, strict=True):
        assert jnp.abs(hidden - other).max() > 0.01, "caps and sinks did not matter"


@pytest.mark.slow
def test_sinks_are_trained():
    target = target_of("gpt_oss")
    head = mtp_head(target, mixing=1.0, context=1.0)

    mixer: Any = head.layers[0].mixer

    def loss(sinks: jax.Array) -> jax.Array:
        changed = with_mixer(head, mixer.replace(sinks=sinks))
        return LossConfig(steps=2)(changed, target, batch_of(TOKENS))[0]

    sinks = mixer.sinks
    slopes = np.asarray(jax.jit(jax.grad(loss), compiler_options=FAST_COMPILE)(sinks))
    step, around = 0.02, jax.jit(loss, compiler_options=FAST_COMPILE)
    for index, slope in enumerate(slopes):
        one = jnp.zeros_like(sinks).at[index].set(step)
        expected = (around(sinks + one) - around(sinks - one)) / (2 * step)
        np.testing.assert_allclose(slope, expected, atol=2e-5, rtol=0.05)
    assert np.abs(slopes).max() > 1e-4


@pytest.mark.slow
def test_logits_are_capped_in_the_loss():
    """Those of the model and of the layer; by hand."""
    target = target_of("gemma2")
    head, config = mtp_head(target, mixing=1.0), LossConfig(steps=1)
    _, metrics = jit_loss(head, target, batch_of(TOKENS), config)
    features, hidden = jit_states(target, batch_of(TOKENS), head.capture, dense_causal_attend)
    [(_, normed)] = unroll(head, target, jnp.asarray(TOKENS), features, 1)
    assert target.lm_head is not None
    wanted, drafted = (x[:, 1:-1] @ target.lm_head.weight for x in (hidden, normed))
    p, q = (jax.nn.log_softmax(3 * jnp.tanh(x / 3)) for x in (wanted, drafted))
    expected = -(jnp.exp(p) * q).sum(axis=-1).mean()
    np.testing.assert_allclose(metrics["loss"][0], expected, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options", "config"),
    [
        ("eagle3", {"draft_vocab_size": 64}, LossConfig(steps=3)),
        slow("eagle1", {"fc_bias": True}, LossConfig(steps=2, hidden_weight=1.0, token_weight=0.1)),
    ],
)
def test_gradients_agree_with_finite_differences(method, options, config):
    with jax.enable_x64(True):
        target, head = jax.tree.map(
            lambda x: jnp.asarray(np.asarray(x), jnp.float64) if x.dtype == jnp.float32 else x,
            (TARGET, random_head(method, **options)),
        )

        def loss(layers, fc, norm, lm_head):
            front = head.front.replace(fc=fc)
            changed = head.replace(layers=layers, front=front, norm=norm, lm_head=lm_head)
            return config(changed, target, batch_of(TOKENS))[0]

        parts = (head.layers, head.front.fc, head.norm, head.lm_head)
        check_grads(jax.jit(loss), parts, order=1, modes=("rev",), atol=2e-3, rtol=2e-3, eps=1e-3)


def test_only_marked_tokens_are_learned():
    """Entry ``i`` of step ``s`` counts when token ``i + 1`` is marked: by hand, for one token."""
    head, config = random_head("eagle3"), LossConfig(steps=2)
    learned = np.zeros(TOKENS.shape, bool)
    learned[0, 7] = True
    _, metrics = jit_loss(head, TARGET, batch_of(TOKENS, learned), config)
    features, hidden = jit_states(TARGET, batch_of(TOKENS), head.capture, dense_causal_attend)
    wanted = jax.nn.softmax(hidden[0, 6] @ LM_HEAD)
    unrolled = jax.jit(unroll, static_argnums=4, compiler_options=FAST_COMPILE)
    for step, (_, normed) in enumerate(unrolled(head, TARGET, TOKENS, features, 2)):
        logits = head.logits(TARGET, normed[0, 6])
        expected = -jnp.sum(wanted * jax.nn.log_softmax(logits))
        np.testing.assert_allclose(metrics["loss"][step], expected, rtol=1e-4)
        assert metrics["accuracy"][step] == (jnp.argmax(logits) == jnp.argmax(wanted))
        overlap = jnp.minimum(wanted, jax.nn.softmax(logits)).sum()
        np.testing.assert_allclose(metrics["overlap"][step], overlap, rtol=1e-4)


def test_a_target_outside_the_draft_vocabulary_is_not_learned_but_counted():
    head = random_head("eagle3", draft_vocab_size=4)
    _, hidden = jit_states(TARGET, batch_of(TOKENS), head.capture, dense_causal_attend)
    best = np.asarray(jnp.argmax(hidden @ LM_HEAD, axis=-1))[:, 1:-1]
    unknown = ~np.isin(best, np.asarray(head.token_ids))
    assert unknown.any()
    learned = np.zeros(TOKENS.shape, bool)
    learned[:, 2:] = unknown
    loss, metrics = jit_loss(head, TARGET, batch_of(TOKENS, learned), LossConfig(steps=1))
    assert loss == 0 and metrics["accuracy"] == 0 and 0 < metrics["overlap"] < 1


@pytest.mark.parametrize("options", [{"steps": 0}, {"step_decay": 0.0}])
def test_bad_loss_configs_are_errors(options):
    with pytest.raises(ValueError, match="steps must be at least 1"):
        LossConfig(**options)
