"""jaxspec's heads against the written-out EAGLE-3 and 3.1."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from safetensors.numpy import load_file

from jaxspec import LLM, SamplingParams, SpeculationConfig
from jaxspec.checkpoints.eagle import load_eagle_head
from jaxspec.checkpoints.safetensors_io import load_decoder
from jaxspec.config.engine import EngineConfig
from jaxspec.models.attention_heads import Heads
from jaxspec.models.decoder import Decoder
from jaxspec.models.from_config.model import load_model_config, read_json
from jaxspec.models.heads import DraftHead
from jaxspec.models.linear import Linear
from tests.helpers.checkpoints import tiny_byte_llama, tiny_llama
from tests.helpers.eagle3_reference import Outputs, Result, read_and_draft
from tests.helpers.eagle31_checkpoint import tiny_eagle31_head
from tests.helpers.marks import first_is_fast, slow

LENGTH, DRAFTS = 9, 3
HIDDEN, VOCAB = 64, 320


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target"), num_hidden_layers=8)


def prompt(num_captured: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, the target's captured states and positions. Layers are of very different size."""
    rng = np.random.default_rng(0)
    sizes = np.repeat(3.0 ** np.arange(num_captured), HIDDEN)
    captured = sizes * rng.standard_normal((LENGTH, num_captured * HIDDEN))
    tokens = rng.integers(VOCAB, size=LENGTH)
    return tokens, captured.astype(np.float32), np.arange(LENGTH)


def reference(directory: Path, target: Decoder, *inputs: np.ndarray) -> Result:
    assert isinstance(target.lm_head, Linear)
    embeddings, lm_head = np.asarray(target.embed)[:VOCAB], np.asarray(target.lm_head.weight).T
    tensors = {"lm_head.weight": lm_head} | load_file(directory / "model.safetensors")
    config = read_json(directory / "config.json")
    return read_and_draft(tensors, config, embeddings, *inputs, num_drafts=DRAFTS)


def growing_attend(cache: Any, heads: Heads, window: int | None) -> tuple[Array, Any]:
    """Attention of a prompt, then of one entry after the other to all before it."""
    q, *kv = heads.rotated()
    if cache is not None:
        kv = [jnp.concatenate(pair, axis=1) for pair in zip(cache, kv, strict=True)]
    return jax.nn.dot_product_attention(q, *kv, is_causal=cache is None), kv


def ours(
    head: DraftHead,
    target: Decoder,
    tokens: np.ndarray,
    captured: np.ndarray,
    positions: np.ndarray,
    drafts: np.ndarray,
) -> list[Outputs]:
    """jaxspec's outputs for the prompt's entries, then for one draft token after the other."""
    states, steps = (None,) * len(head.layers), []
    hidden = head.hidden(jnp.asarray(captured[:-1])[None])
    entries = [(tokens[1:], positions[:-1])]
    entries += [([token], [positions[-1] + j]) for j, token in enumerate(drafts[:-1])]
    for entry in entries:
        ids, at = (jnp.asarray(array)[None] for array in entry)
        out = head.run(target, ids, hidden, at, states, growing_attend)
        states, hidden = out.states, out.hidden[:, -1:]
        found = (out.hidden, out.normed, head.logits(target, out.normed))
        steps.append(Outputs(*(np.asarray(array[0]) for array in found)))
    return steps


def assert_close(ours: Outputs, theirs: Outputs, rows: Any) -> None:
    for name in ("recycled", "normed", "logits"):
        want = getattr(theirs, name)[rows]
        tolerance = 1e-5 * np.abs(want).max()
        np.testing.assert_allclose(getattr(ours, name), want, rtol=0, atol=tolerance, err_msg=name)


PLAIN = {
    "flat": {},
    "nvidia": {"style": "nvidia", "capture": (3, 5, 8)},
    "biases on q, k and v": {"qkv_bias": True},
    "two states": {"capture": (2, 6)},
    "five states": {"capture": (2, 3, 4, 6, 7)},
    "the whole vocabulary": {"draft_vocab": None},
    "the target's LM head": {"draft_vocab": None, "has_lm_head": False},
    "another hidden size": {"has_embeddings": True, "hidden_size": 96, "head_dim": 16},
    "a KV head for each query head": {"num_key_value_heads": 4, "rope_theta": 5e5},
}


def assert_agrees(directory: Path, target: Decoder, capture: tuple[int, ...]) -> None:
    """Our loader, head and chain of drafts give what the reference gives."""
    head = load_eagle_head(directory, target.config, target.dtype)
    assert head.capture == capture
    inputs = prompt(len(capture))
    theirs = reference(directory, target, *inputs)
    first, *later = ours(head, target, *inputs, theirs.tokens)
    assert_close(first, theirs.prompt, slice(1, None))
    for j, step in enumerate(later, start=1):
        assert_close(step, theirs.drafts, slice(j, j + 1))
    ids = np.arange(VOCAB) if head.token_ids is None else np.asarray(head.token_ids)
    drafted = [int(ids[step.logits[-1].argmax()]) for step in (first, *later)]
    np.testing.assert_array_equal(theirs.tokens, drafted)


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Decoder:
    return load_decoder(target_dir, load_model_config(target_dir), jnp.dtype("float32"))


@first_is_fast([*PLAIN])
def test_plain_heads_agree_with_jaxspec(case: str, target_dir: Path, target, tmp_path: Path):
    options = PLAIN[case]
    directory = tiny_eagle31_head(tmp_path, target_dir, **options)
    assert_agrees(directory, target, options.get("capture", (2, 4, 5)))


FLAGS = {
    "plain": {},
    "fc_norm": {"fc_norm": True},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_output": {"norm_output": True},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "speculators' default": {
        "norm_before_fc": True, "norm_output": True, "norm_before_residual": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("num_captured", [slow(1), 3, slow(5)])
@pytest.mark.parametrize("flags", FLAGS)
def test_heads_of_eagle_31_agree_with_jaxspec(
    flags, num_captured, target_dir: Path, target, tmp_path: Path
):
    capture = tuple(range(2, 2 + num_captured))
    heads = []
    for style in ("flat", "nvidia", "speculators"):
        options = FLAGS[flags] | {"style": style, "capture": capture}
        directory = tiny_eagle31_head(tmp_path / style, target_dir, **options)
        heads.append(load_eagle_head(directory, target.config, target.dtype))
    for head in heads[1:]:
        assert jax.tree.structure(head) == jax.tree.structure(heads[0])
        same = jax.tree.map(np.array_equal, head, heads[0])
        assert all(jax.tree.leaves(same))
    assert_agrees(directory, target, capture)


@pytest.mark.parametrize("flags", [slow("EAGLE-3.1"), slow("speculators' default")])
def test_text_is_that_of_plain_decoding(flags: str, tmp_path: Path):
    model = tiny_byte_llama(tmp_path / "model")
    options = FLAGS[flags] | {"capture": (0, 2), "style": "nvidia", "draft_vocab": 200}
    head = tiny_eagle31_head(tmp_path / "head", model, **options)
    sampling = [
        SamplingParams(max_tokens=24),
        SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=3),
    ]
    texts = []
    for drafter in ("none", head):
        llm = LLM(
            model, drafter, dtype="float32", max_length=64, engine=EngineConfig(max_rows=2),
            speculation=SpeculationConfig(num_nodes=9, max_depth=3, top_k=3),
        )  # fmt: skip
        texts.append([c.token_ids for c in llm.generate(["def f(x):", "import os"], sampling)])
    assert texts[0] == texts[1]
