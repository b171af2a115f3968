"""Layers for multi-token prediction: transformers' arithmetic, and checkpoints' names."""

import dataclasses
import json
import operator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from jaxspec import LLM, SamplingParams, SpeculationConfig, load
from jaxspec.checkpoints.load_drafter import choose_drafter
from jaxspec.checkpoints.mtp import load_mtp_head, save_mtp_head
from jaxspec.checkpoints.safetensors_io import load_decoder
from jaxspec.config.mtp import AFTER, ALL_MTP_STATES, BEFORE, BEFORE_AFTER, MtpStates
from jaxspec.decoding.drafters import NoDrafter
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import FINAL_NORM, Decoder
from jaxspec.models.from_config.model import load_model_config, parse_model_config
from jaxspec.models.heads import DraftHead, HeadOutput, mtp_states
from jaxspec.models.json.values import read_json
from jaxspec.parallel import make_mesh
from tests.helpers import parity
from tests.helpers.checkpoints import (
    add_mtp_layer,
    hf_logits,
    save_byte_tokenizer,
    tiny_llama,
    tiny_qwen2,
)
from tests.helpers.marks import slow
from tests.helpers.mtp_families import save_with_mtp
from tests.helpers.mtp_reference import torch_mtp

FLOAT32 = jnp.dtype("float32")
TOKENS = np.random.default_rng(0).integers(0, 257, (2, 13))
SMALL: dict[str, Any] = {"vocab_size": 257, "num_hidden_layers": 2}
NAME_OF = operator.attrgetter("name")
CHAIN, TREE = SpeculationConfig.chain(3), SpeculationConfig(num_nodes=8, max_depth=3, top_k=2)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {
        "deepseek": tiny_llama(tmp_path_factory.mktemp("deepseek"), **SMALL),
        "mimo": tiny_qwen2(tmp_path_factory.mktemp("mimo"), **SMALL),
    }
    for layout, path in made.items():
        add_mtp_layer(path, layout)
        save_byte_tokenizer(path)
    return made


def reference(path: Path, layout: str, kind: Any, *, normed: bool) -> tuple[np.ndarray, np.ndarray]:
    """transformers' MTP layer over TOKENS: hidden states after its norm, and logits."""
    model, mtp = torch_mtp(path, layout, kind)
    ids = torch.from_numpy(TOKENS)
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
        hidden = out.hidden_states[-1]  # transformers norms the last one
        if not normed:
            found: list[torch.Tensor] = []
            hook = model.model.norm.register_forward_pre_hook(lambda _, args: found.append(args[0]))
            model(ids)
            hook.remove()
            [hidden] = found
        positions = torch.arange(ids.shape[1] - 1)[None]
        after = mtp.forward_layer(0, hidden[:, :-1], positions, None, input_ids=ids[:, 1:])
        return after.numpy(), model.lm_head(after).numpy()


@pytest.mark.parametrize(
    "states", [AFTER, *(slow(one) for one in ALL_MTP_STATES if one != AFTER)], ids=NAME_OF
)
@pytest.mark.parametrize(
    ("layout", "kind"),
    [("deepseek", transformers.LlamaConfig), ("mimo", transformers.Qwen2Config)],
    ids=["deepseek", "mimo"],
)
def test_logits_are_those_of_transformers(
    layout: str, kind: Any, states: MtpStates, checkpoints: dict[str, Path]
):
    path, normed = checkpoints[layout], states.target_normed
    expected, expected_logits = reference(path, layout, kind, normed=normed)
    config = load_model_config(path)
    target = load_decoder(path, config, FLOAT32)
    head = load_mtp_head(path, config, FLOAT32, states=states)
    assert head.capture == ((FINAL_NORM,) if normed else (config.num_layers,))

    @jax.jit
    def run(target: Decoder, head: DraftHead) -> tuple[HeadOutput, jax.Array]:
        positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
        tokens, none = jnp.asarray(TOKENS), target.no_states()
        read = tokens, positions, none, dense_causal_attend
        captured = decoder.run(target, *read, head.capture)[2]
        assert captured is not None
        read = tokens[:, 1:], head.hidden(captured[:, :-1]), positions[:, :-1], (None,)
        out = head.run(target, *read, dense_causal_attend)
        return out, head.logits(target, out.normed)

    out, logits = run(target, head)
    np.testing.assert_allclose(out.normed, expected, atol=1e-4)
    np.testing.assert_allclose(logits, expected_logits, atol=2e-4)
    assert (
        np.array_equal(out.hidden, out.normed) == states.draft_normed
    )  # what the next draft step reads


def texts(llm: LLM) -> tuple[list[list[int]], list[list[float]]]:
    """And how many rounds of each text accepted a draft at each depth."""
    prompts = [TOKENS[0].tolist(), TOKENS[1, :4].tolist()]
    sampling = [
        SamplingParams(max_tokens=40, temperature=0.7 * seed, seed=seed, ignore_eos=True)
        for seed in (0, 1)
    ]
    outputs = llm.generate(prompts, sampling)
    accepted = [[one.num_rounds * share for share in one.acceptance_by_depth] for one in outputs]
    if not isinstance(llm.params.drafter, NoDrafter):
        assert min(own[0] for own in accepted) > 4, "hardly a draft was accepted"
    return [one.token_ids for one in outputs], accepted


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints whose MTP layer guesses well."""
    made = {}
    for layout, family in (("deepseek", "llama"), ("mimo", "mimo")):
        path = tmp_path_factory.mktemp(layout)
        made[layout] = save_with_mtp(path, family, context=0.1, vocab_size=257, hidden_size=64)
        save_byte_tokenizer(made[layout])
    return made


@pytest.mark.slow
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("layout", ["mimo", "deepseek"])
def test_checkpoints_draft_with_their_own_layers(
    layout: str, shape: SpeculationConfig, drafting: dict[str, Path]
):
    """By default, and the text is that of plain decoding."""
    path = drafting[layout]
    options: dict[str, Any] = {"dtype": "float32", "max_length": 64}
    plain, _ = texts(LLM(path, "none", **options))
    llm = LLM(path, speculation=shape, **options)
    drafter: Any = llm.params.drafter
    assert isinstance(drafter.head, DraftHead) and drafter.head.method == "mtp"
    assert texts(llm)[0] == plain


@pytest.mark.parametrize(
    "name",
    ["mtp", *(slow(f"mtp:{states.name}") for states in ALL_MTP_STATES)],
)
def test_what_the_layers_read_never_changes_the_text(name: str, drafting: dict[str, Path]):
    options: dict[str, Any] = {"dtype": "float32", "max_length": 64}
    plain, _ = texts(LLM(drafting["mimo"], "none", **options))
    assert texts(LLM(drafting["mimo"], name, speculation=CHAIN, **options))[0] == plain


@pytest.mark.slow
@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])  # the MTP layer
@pytest.mark.parametrize("devices", [2, 4])  # on four, KV heads are repeated
def test_devices_give_the_text_of_one(devices: int, split: bool, drafting: dict[str, Path]):
    """And draft as well as one does."""
    path, mesh = drafting["mimo"], make_mesh(tensor_parallel=devices)
    options: dict[str, Any] = {"dtype": "float32", "max_length": 64, "speculation": TREE}
    plain, _ = texts(LLM(path, "none", **options))
    found, accepted = texts(LLM(path, "mtp", mesh=mesh, shard_drafter=split, **options))
    assert found == plain
    assert accepted == texts(LLM(path, "mtp", **options))[1]


@pytest.mark.parametrize(
    ("page_size", "step"), [(3, 1), (7, TOKENS.shape[1]), slow(1, TOKENS.shape[1]), slow(5, 1)]
)
def test_the_body_of_mimo_has_the_logits_of_qwen2(page_size: int, step: int, tmp_path: Path):
    """Read whole, or token by token."""
    path = tiny_qwen2(tmp_path, **SMALL)
    expected = hf_logits(path, TOKENS)
    add_mtp_layer(path, "mimo")
    assert read_json(path / "config.json")["model_type"] == "mimo"
    found = parity.paged_logits(parity.load(path), TOKENS, page_size, step)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)


def test_auto_chooses_the_layers_and_says_what_they_read(checkpoints: dict[str, Path]):
    assert choose_drafter(checkpoints["deepseek"], "auto") == "mtp:after"
    assert choose_drafter(checkpoints["mimo"], "auto") == "mtp:before-after"
    for states in ALL_MTP_STATES:
        name = f"mtp:{states.name}"
        assert choose_drafter(checkpoints["mimo"], name) == name
    for lookup in ("ngram", "suffix"):
        assert choose_drafter(checkpoints["mimo"], f"{lookup}+mtp") == f"{lookup}+mtp:before-after"
    params = load(checkpoints["mimo"], "mtp:after", speculation=SpeculationConfig.chain(1))
    assert params.drafter.capture == (FINAL_NORM,)


def test_a_layer_is_saved_and_loaded_by_itself(checkpoints: dict[str, Path], tmp_path: Path):
    path = checkpoints["deepseek"]
    config = load_model_config(path)
    head = load_mtp_head(path, config, FLOAT32)
    save_mtp_head(head, tmp_path, read_json(path / "config.json"))
    stored = load_file(tmp_path / "model.safetensors")
    original = load_file(path / "model.safetensors")
    assert stored and all(np.array_equal(one, original[name]) for name, one in stored.items())
    drafter: Any = load(path, tmp_path, speculation=SpeculationConfig.chain(1)).drafter
    np.testing.assert_array_equal(drafter.head.front.fc.weight, head.front.fc.weight)


@pytest.mark.parametrize("states", ALL_MTP_STATES, ids=NAME_OF)
@pytest.mark.parametrize("layout", ["deepseek", "mimo"])
def test_a_layer_by_itself_reads_what_it_was_saved_with(
    layout: str, states: MtpStates, checkpoints: dict[str, Path], tmp_path: Path
):
    """Not what its family reads: a trained layer drafts as it was trained."""
    path = checkpoints[layout]
    config, raw = load_model_config(path), read_json(path / "config.json")
    head = load_mtp_head(path, config, FLOAT32, states=states)
    save_mtp_head(head, tmp_path, raw)
    drafter: Any = load(path, tmp_path, speculation=SpeculationConfig.chain(1)).drafter
    assert drafter.head.capture == ((FINAL_NORM,) if states.target_normed else (config.num_layers,))
    assert drafter.head.recycle_normed == states.draft_normed
    assert mtp_states(drafter.head) == states


def test_unknown_states_are_named(checkpoints: dict[str, Path]):
    assert [states.name for states in (BEFORE, BEFORE_AFTER)] == ["before", "before-after"]
    raw = read_json(checkpoints["mimo"] / "config.json")
    message = "mtp_states: .* one of before, after, before-after, after-before, got 'first'"
    with pytest.raises(ValueError, match=message):
        parse_model_config(raw | {"mtp_states": "first"})


def test_models_without_such_layers_are_named(tmp_path: Path):
    path = tiny_llama(tmp_path, **SMALL)
    with pytest.raises(ValueError, match="has no layers for multi-token prediction"):
        load(path, "mtp")
    config = path / "config.json"
    config.write_text(config.read_text().replace("{", '{"num_nextn_predict_layers": 1,', 1))
    with pytest.raises(ValueError, match=r"no tensors model.layers.2\.\*, though its config.json"):
        load(path, "mtp")
    assert choose_drafter(path, "auto") == "ngram"


@pytest.mark.parametrize("count", [-1, "1", 1.5, True])
def test_bad_counts_are_named(count: Any, checkpoints: dict[str, Path]):
    raw = json.loads((checkpoints["deepseek"] / "config.json").read_text())
    with pytest.raises(ValueError, match="num_nextn_predict_layers must be a number of layers"):
        parse_model_config(raw | {"num_nextn_predict_layers": count})


def test_misfits_are_named(checkpoints: dict[str, Path]):
    path = checkpoints["deepseek"]
    config = load_model_config(path)
    wider = dataclasses.replace(config, hidden_size=96)
    with pytest.raises(ValueError, match=r"model.layers.2.eh_proj.weight is \[64, 128\], not"):
        load_mtp_head(path, wider, FLOAT32)
