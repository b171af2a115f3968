"""Log-probabilities of texts and their gradients are those of transformers."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from jaxspec import make_mesh, token_logprobs
from jaxspec.checkpoints.safetensors_io import load_decoder, save_decoder
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.evaluation.benchmarks.collective_volume import parse_collectives
from jaxspec.models.from_config.model import load_model_config
from tests.helpers.checkpoints import tiny_llama
from tests.helpers.layouts import on_mesh
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import make_params, random_target, tiny_config
from tests.helpers.sampling_reference import plain_logits, processors

TARGET = random_target(tiny_config(num_layers=1))
LENGTHS = np.array([11, 7, 12, 1])
TOKENS = np.random.default_rng(0).integers(0, 96, (4, 12), np.int32)
WEIGHTS = np.random.default_rng(1).standard_normal((4, 12)).astype(np.float32)
jit = functools.partial(jax.jit, compiler_options=FAST_COMPILE)
jit_scores = jit(token_logprobs, static_argnames="chunk")


def reference(sampling: SamplingParams) -> np.ndarray:
    """The same [B, T] with transformers' processors on plain logits."""
    logits = torch.from_numpy(np.asarray(plain_logits(TARGET, jnp.asarray(TOKENS))).copy())
    chain = processors(sampling, 0)
    found = np.zeros(TOKENS.shape, np.float32)
    for row, length in enumerate(LENGTHS):
        for t in range(1, length):
            scores = chain(torch.from_numpy(TOKENS[[row], :t]).long(), logits[[row], t - 1])
            found[row, t] = torch.log_softmax(scores, -1)[0, TOKENS[row, t]]
    return found


@pytest.mark.parametrize(
    "policy", [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 20, "top_p": 0.95}], ids=str
)
def test_they_are_those_of_the_policy(policy: dict[str, Any]):
    rules: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | policy
    found = jit_scores(TARGET, TOKENS, LENGTHS, **rules if policy else {})
    assert found.dtype == jnp.float32
    expected = reference(SamplingParams(**rules))
    assert np.isneginf(expected).any() == ("top_k" in policy)
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_chunks_and_rows_change_nothing():
    whole = jit_scores(TARGET, TOKENS, LENGTHS)
    parts = jit_scores(TARGET, TOKENS, LENGTHS, chunk=5)
    one_by_one = jax.vmap(lambda row, length: token_logprobs(TARGET, row[None], length[None])[0])
    np.testing.assert_allclose(parts, whole, atol=1e-5)
    np.testing.assert_allclose(jit(one_by_one)(TOKENS, LENGTHS), whole, atol=1e-5)


def test_at_temperature_zero_the_likeliest_token_is_certain():
    likeliest = np.argmax(plain_logits(TARGET, jnp.asarray(TOKENS)), -1)
    found = jit_scores(TARGET, TOKENS, LENGTHS, temperature=0.0, top_k=0, top_p=1.0)
    expected = np.where(TOKENS[:, 1:] == likeliest[:, :-1], 0, -np.inf)
    inside = np.arange(1, 12) < LENGTHS[:, None]
    np.testing.assert_array_equal(found[:, 1:], np.where(inside, expected, 0))


def test_a_chunk_below_one_is_refused():
    with pytest.raises(ValueError, match="chunk must be an integer, at least 1, got 0"):
        token_logprobs(TARGET, TOKENS, chunk=0)


def loss(target: Any, mesh: Any = None, chunk: int | None = None, **policy: Any) -> jax.Array:
    scores = token_logprobs(
        target, TOKENS, LENGTHS, mesh=mesh, remat=chunk is not None, chunk=chunk, **policy
    )
    return jnp.sum(WEIGHTS * scores)


def gradients_of_transformers(directory: Path, temperature: float) -> dict[str, np.ndarray]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.from_numpy(TOKENS).long()
    scores = torch.log_softmax(model(tokens).logits / temperature, -1)[:, :-1]
    given = torch.gather(scores, 2, tokens[:, 1:, None])[..., 0]
    inside = torch.arange(1, TOKENS.shape[1]) < torch.from_numpy(LENGTHS)[:, None]
    (given * inside * torch.from_numpy(WEIGHTS)[:, 1:]).sum().backward()
    return {name: weight.grad.numpy() for name, weight in model.named_parameters()}


def assert_gradients_agree(gradients: Any, expected: dict[str, np.ndarray], path: Path) -> None:
    save_decoder(gradients, path)
    found = load_file(path / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = np.linalg.norm(found[name] - gradient) / np.linalg.norm(gradient)
        assert error < 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    ("tied", "tensor", "data"),
    [
        (True, 4, 1),
        *(slow(True, 1, 1), slow(False, 1, 1), slow(True, 2, 1), slow(False, 2, 1)),
        *(slow(False, 4, 1), slow(False, 2, 2), slow(False, (2, 2), 1), slow(True, 1, 4)),
    ],
    ids=str,
)
def test_gradients_are_those_of_transformers(tmp_path: Path, tied: bool, tensor: Any, data: int):
    """On four devices of tensor parallelism the two KV heads are repeated, and the vocabulary is
    padded."""
    directory = tiny_llama(
        tmp_path / "model", vocab_size=98, num_hidden_layers=1, tie_word_embeddings=tied,
        attention_bias=True,
    )  # fmt: skip
    mesh = None if (tensor, data) == (1, 1) else make_mesh(tensor, data)
    target = load_decoder(directory, load_model_config(directory), jnp.dtype("float32"), mesh)
    how = functools.partial(loss, mesh=mesh, chunk=5, temperature=0.8)
    gradients = jit(jax.grad(how))(target)
    assert_gradients_agree(gradients, gradients_of_transformers(directory, 0.8), tmp_path / "found")
    if mesh is not None:
        assert gradients.embed.sharding.is_equivalent_to(target.embed.sharding, 2)
    if tensor == 4:
        keys = gradients.layers[0].mixer.qkv.weight[:, :, -2:]
        np.testing.assert_allclose(keys[:, 0::2], keys[:, 1::2], rtol=1e-6)


@pytest.mark.slow
def test_devices_exchange_sums_alone():
    """No device gathers weights, hidden states of all rows, or logits of all tokens."""
    target, mesh = random_target(tiny_config(vocab_size=128, num_heads=8)), make_mesh(2, 2)
    params = make_params("none", SpeculationConfig.chain(0), target)
    gradient = jit(jax.grad(functools.partial(loss, mesh=mesh, chunk=5)))
    text = gradient.lower(on_mesh(params, mesh).target).compile().as_text()
    collectives = parse_collectives(text or "")
    assert {each.kind for each in collectives} == {"all-reduce"}
