"""Layers by themselves: what runs through them, and what the methods make of them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.safetensors_io import load_decoder
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.from_config.model import load_model_config
from jaxspec.quantize.checkpoint import Checkpoint, layer_kinds
from jaxspec.quantize.gptq import GptqConfig
from jaxspec.quantize.layers import (
    SHARED,
    Batch,
    advance,
    embedded,
    inputs_of,
    layer_output,
    observe,
)
from jaxspec.quantize.methods import Method, apply_scale, exact_scale, quantize_layer
from jaxspec.quantize.rounding import Grid
from jaxspec.quantize.scoring import score
from tests.helpers.checkpoints import hf_logits, tiny_llama
from tests.helpers.families import save_family
from tests.helpers.marks import slow

TOKENS = np.random.default_rng(0).integers(0, 320, (4, 24))  # two batches of one shape
VALID = np.ones(TOKENS.shape, bool)
GRID = Grid(3, 32, False)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("model")
    return Checkpoint(tiny_llama(folder, num_key_value_heads=4, num_hidden_layers=1))


def states_of(checkpoint: Checkpoint) -> list[Batch]:
    return embedded(checkpoint.embedding(), TOKENS, VALID, 2)


@pytest.mark.parametrize(
    "family", ["llama-gqa", "qwen3", slow("mistral-window"), slow("qwen2"), slow("granite")]
)
def test_layers_one_by_one_are_the_model(family: str, tmp_path: Path):
    """Through the quantizer's layers, and through those of the perplexity."""
    checkpoint = Checkpoint(save_family(tmp_path, family))
    assert checkpoint.config is not None
    batches = states_of(checkpoint)
    kinds, units = layer_kinds(checkpoint.config), checkpoint.units(lm_head=False)
    for unit, kind in zip(units, kinds, strict=True):
        kind.check()
        batches = advance(checkpoint.tensors(unit), batches, kind)
    model = load_decoder(tmp_path, load_model_config(tmp_path), jnp.dtype("float32"))
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    hidden, _, after = jax.jit(
        lambda tokens: decoder.run(
            model, tokens, positions, model.no_states(), dense_causal_attend, (len(units),)
        )
    )(jnp.asarray(TOKENS))
    states = np.asarray(after)
    found = np.concatenate([batch.states for batch in batches])
    np.testing.assert_allclose(found, states, atol=1e-4 * np.abs(states).max())
    scores = score(tmp_path, TOKENS, VALID, 2)
    chosen = jax.nn.log_softmax(decoder.logits(model, hidden))[:, :-1]
    wanted = -np.take_along_axis(np.asarray(chosen), TOKENS[:, 1:, None], -1).sum((1, 2))
    np.testing.assert_allclose(scores.nats, wanted, rtol=1e-4)
    assert (scores.tokens == TOKENS.shape[1] - 1).all()


@pytest.mark.parametrize("family", ["gemma2", slow("olmo2"), slow("phi3"), slow("cohere2")])
def test_layers_that_no_method_is_written_for_are_refused(family: str, tmp_path: Path):
    """Their perplexity is that of the model all the same."""
    save_family(tmp_path, family, num_hidden_layers=1)
    config = load_model_config(tmp_path)
    with pytest.raises(ValueError, match="no method is written for"):
        layer_kinds(config)[0].check()
    scores = score(tmp_path, TOKENS, VALID, 2)
    logits = jnp.asarray(hf_logits(tmp_path, TOKENS))
    chosen = np.asarray(jax.nn.log_softmax(logits))[:, :-1]
    wanted = -np.take_along_axis(chosen, TOKENS[:, 1:, None], -1).sum((1, 2))
    np.testing.assert_allclose(scores.nats, wanted, rtol=1e-4)


def test_padding_does_not_count(llama: Checkpoint):
    assert llama.config is not None
    [unit], [kind] = llama.units(lm_head=False), layer_kinds(llama.config)
    tensors, batches = llama.tensors(unit), states_of(llama)
    valid = VALID.copy()
    valid[:, 10:] = False
    short = embedded(llama.embedding(), TOKENS[:, :10], VALID[:, :10], 3)
    padded = embedded(llama.embedding(), TOKENS, valid, 2)
    for shared in SHARED[-1:]:  # its inputs depend on all the others
        [found], [wanted], [whole] = (
            observe(tensors, given, kind, (shared,)) for given in (padded, short, batches)
        )
        assert found.count == 40 and whole.count == 96
        for ours, theirs in zip(found, wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)
        parts = [inputs_of(tensors, jnp.asarray(b.states), kind, (shared,)) for b in batches]
        inputs = np.concatenate([own for [own] in parts])
        rows = inputs.reshape(-1, inputs.shape[-1])
        np.testing.assert_allclose(whole.hessian, rows.T @ rows, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(whole.magnitude, np.abs(rows).sum(0), rtol=1e-4)


@pytest.mark.parametrize("heads", [4, 2])
def test_scales_change_nothing_by_themselves(heads: int, tmp_path: Path):
    biases = {"attention_bias": True, "mlp_bias": True}
    checkpoint = Checkpoint(tiny_llama(tmp_path, num_key_value_heads=heads, **biases))
    assert checkpoint.config is not None
    unit, kind = checkpoint.units(lm_head=False)[0], layer_kinds(checkpoint.config)[0]
    tensors, [batch, _] = checkpoint.tensors(unit), states_of(checkpoint)
    wanted = layer_output(tensors, batch.states, kind)
    scaled, count, rng = tensors, 0, np.random.default_rng(0)
    for shared in SHARED:
        before = tensors[f"{shared.before}.weight"]
        size = tensors[f"{shared.projections[0]}.weight"].shape[1]
        if len(before) == size:
            scale = exact_scale(before, jnp.asarray(rng.uniform(0.3, 3, size), jnp.float32))
            scaled, count = apply_scale(scaled, shared, scale), count + 1
    assert count == (4 if heads == 4 else 3)
    found = layer_output(scaled, batch.states, kind)
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())


def test_scales_are_those_of_rounded_norms():
    norm = jnp.asarray([1.0, 0.3, 0.0, 7.1], jnp.bfloat16)
    scale = jnp.asarray([1.7, 0.13, 2.0, 3.3], jnp.float32)
    exact = exact_scale(norm, scale)
    stored = (norm / scale).astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_allclose(stored * exact, norm.astype(jnp.float32), rtol=1e-6)
    np.testing.assert_allclose(exact, scale, rtol=5e-3)


# By default gptq by itself is in test_gptq.py.
@pytest.mark.parametrize("method", ["awq", slow("gptq")])
def test_awq_and_gptq_change_outputs_less_than_rounding(method: Method, llama: Checkpoint):
    """Of the layer as a whole, and gptq of every projection."""
    assert llama.config is not None
    [unit], [kind] = llama.units(lm_head=False), layer_kinds(llama.config)
    rng, tensors = np.random.default_rng(0), llama.tensors(unit)
    norms = {
        name: jnp.asarray(np.where(rng.random(len(own)) < 0.05, 10, 1) * own)
        for name, own in tensors.items()
        if "norm" in name
    }  # some inputs are much larger, as in real models
    tensors |= norms
    batches = states_of(llama)
    wanted = advance(tensors, batches, kind)
    change, errors = {}, {}
    for name in ("rtn", method):
        found = quantize_layer(name, tensors, batches, kind, GRID, GptqConfig())
        after = advance(found.applied(tensors), batches, kind)
        pairs = zip(after, wanted, strict=True)
        change[name] = sum(np.square(ours.states - own.states).sum() for ours, own in pairs)
        errors[name] = found.errors
        assert set(found.projections) == set(kind.names()) == set(found.errors)
        assert bool(found.changed) == (name == "awq")
    assert change[method] < 0.8 * change["rtn"]
    lower = [errors[method][part] < errors["rtn"][part] for part in errors["rtn"]]
    assert method == "awq" or all(lower)
    assert np.mean([*errors[method].values()]) < np.mean([*errors["rtn"].values()])
