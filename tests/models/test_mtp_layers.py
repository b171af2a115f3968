"""Checkpoints with several MTP layers: transformers' draft logits, choices, what is refused."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxspec import LLM, SamplingParams, SpeculationConfig, functional, load
from jaxspec.functional import EngineParams
from jaxspec.loading import choose_drafter
from jaxspec.models.decoder import FINAL_NORM
from jaxspec.models.hf_config import load_model_config
from jaxspec.sampling import make_sampling
from jaxspec.state import EngineState
from jaxspec.weights.mtp import load_mtp_heads
from tests.checkpoints import add_mtp_layer, save_byte_tokenizer, tiny_llama, tiny_qwen2
from tests.marks import slow
from tests.mtp_reference import torch_mtp

FLOAT32 = jnp.dtype("float32")
COUNT, PAGE, LENGTH = 3, 5, 64
KINDS = {"deepseek": transformers.LlamaConfig, "mimo": transformers.Qwen2Config}
SMALL: dict[str, Any] = {"vocab_size": 257, "num_hidden_layers": 2}
PROMPTS = [np.random.default_rng(seed).integers(0, 257, size) for seed, size in ((1, 23), (2, 4))]
# With this rule drafts are drawn, and their distributions kept.
DRAWN = SpeculationConfig.chain(COUNT, acceptance="rejection")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {
        "deepseek": tiny_llama(tmp_path_factory.mktemp("deepseek"), **SMALL),
        "mimo": tiny_qwen2(tmp_path_factory.mktemp("mimo"), **SMALL),
    }
    for layout, path in made.items():
        # Less noise: rounding grows from layer to layer, in transformers' float32 as in ours.
        add_mtp_layer(path, layout, count=COUNT, noise=0.05)
        save_byte_tokenizer(path)
    return made


def draft_after(
    params: EngineParams, width: int, rounds: int
) -> tuple[list[list[int]], np.ndarray]:
    """Committed tokens and drafted ones of each row, and log-probabilities [B, COUNT, V] of drafts,
    after so many rounds. Prompts are read in pieces of ``width``."""
    batch = len(PROMPTS)
    prompts = np.zeros((batch, LENGTH), np.int32)
    for row, prompt in zip(prompts, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    lens = [len(prompt) for prompt in PROMPTS]
    sampling = make_sampling(batch, temperature=1.0, seeds=np.arange(batch, dtype=np.uint32))

    @jax.jit
    def read(state: EngineState) -> EngineState:
        return functional.prefill(params, state, width=width)[0]

    @jax.jit
    def propose(state: EngineState) -> Any:
        if rounds:
            state, _ = functional.decode(params, state, rounds, max_rounds=rounds)
        return state, params.drafter.propose(params.target, state, params.call())[0]

    state = functional.init_state(params, batch, LENGTH, page_size=PAGE)
    state = functional.admit(params, state, np.arange(batch), prompts, lens, sampling=sampling)
    for _ in range(0, max(lens), width):
        state = read(state)
    state, tree = propose(state)
    lengths = np.asarray(state.rows.context_lens) + 1
    committed = [row[:n].tolist() for row, n in zip(np.asarray(state.rows.tokens), lengths, strict=True)]
    drafted = np.asarray(tree.tokens)[:, 1:].tolist()
    texts = [own + more for own, more in zip(committed, drafted, strict=True)]
    return texts, np.log(np.asarray(tree.probs)[:, 1:])


def reference(path: Path, layout: str, text: list[int], *, normed: bool) -> torch.Tensor:
    """transformers' log-probabilities [COUNT, V] of the last COUNT tokens, each by its layer."""
    model, mtp = torch_mtp(path, layout, KINDS[layout], COUNT)
    before: list[torch.Tensor] = []  # what went into the latest norm
    layers: Any = mtp.layers
    for norm in (model.model.norm, *(layer.post_norm for layer in layers)):
        norm.register_forward_pre_hook(lambda _, args: before.append(args[0]))
    ids = torch.tensor([text])
    context = ids[:, : -COUNT - 1]
    with torch.no_grad():
        hidden, found = model(context, output_hidden_states=True).hidden_states[-1], []
        for index in range(COUNT):
            hidden = hidden if normed else before[-1]
            positions = torch.arange(index, index + context.shape[1])[None]
            read = ids[:, 1 + index : 1 + index + context.shape[1]]
            hidden = mtp.forward_layer(index, hidden, positions, None, input_ids=read)
            found.append(torch.log_softmax(model.lm_head(hidden[0, -1]), dim=-1))
    return torch.stack(found)


@pytest.mark.parametrize(
    ("layout", "normed", "width", "rounds"),
    [
        ("deepseek", True, 5, 3),
        slow("deepseek", True, 32, 0),
        slow("deepseek", False, 32, 2),
        slow("deepseek", True, 1, 7),
        slow("mimo", False, 32, 0),
        slow("mimo", False, 3, 4),
        slow("mimo", True, 7, 2),
    ],
)
def test_draft_logits_are_those_of_transformers(
    layout: str, normed: bool, width: int, rounds: int, checkpoints: dict[str, Path]
):
    """After a prompt that was read whole or in pieces, and after rounds that rejected drafts."""
    path = checkpoints[layout]
    name = f"mtp:{'after' if normed else 'before'}"
    params = load(path, name, speculation=DRAWN, dtype="float32")
    texts, ours = draft_after(params, width, rounds)
    theirs = torch.stack([reference(path, layout, text, normed=normed) for text in texts])
    print(f"{layout} {name}: {np.abs(ours - theirs.numpy()).max():.1e}")
    np.testing.assert_allclose(ours, theirs, atol=2e-4, rtol=0)
