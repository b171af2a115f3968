"""Layers for multi-token prediction: which draft, what they change, and checkpoints' names."""

import dataclasses
import json
import operator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec import LLM, SamplingParams, SpeculationConfig, load
from jaxspec.checkpoints.load_drafter import choose_drafter
from jaxspec.checkpoints.mtp import (
    has_mtp_layers,
    holds_only_mtp_layers,
    load_mtp_head,
    save_mtp_head,
)
from jaxspec.config.experts import ExpertsConfig
from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.mtp import ALL_MTP_STATES, BEFORE, BEFORE_AFTER, MtpStates
from jaxspec.decoding.drafters import NoDrafter
from jaxspec.models.decoder import FINAL_NORM
from jaxspec.models.from_config.model import load_model_config, parse_model_config
from jaxspec.models.heads import mtp_states
from jaxspec.models.json.values import read_json
from jaxspec.parallel import make_mesh
from tests.helpers import parity
from tests.helpers.checkpoints import (
    add_mtp_layer,
    hf_logits,
    save_byte_tokenizer,
    save_tensors,
    tiny_llama,
    tiny_qwen2,
)
from tests.helpers.hybrid_checkpoints import contents, save_hybrid
from tests.helpers.marks import slow
from tests.helpers.mtp_families import save_with_mtp

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


def test_the_body_of_mimo_has_the_logits_of_qwen2(tmp_path: Path):
    path = tiny_qwen2(tmp_path, **SMALL)
    expected = hf_logits(path, TOKENS)
    add_mtp_layer(path, "mimo")
    assert read_json(path / "config.json")["model_type"] == "mimo"
    parity.assert_close(parity.paged_logits(parity.load(path), TOKENS, 3, 1), expected)


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


# Qwen's layout, beside a model with recurrent layers.


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("qwen3_next", "qwen3_5_text")
    return {
        name: add_mtp_layer(save_hybrid(tmp_path_factory.mktemp(name), name), "qwen")
        for name in names
    }


def test_the_layer_has_gated_attention_and_the_models_mlp(hybrids: dict[str, Path]):
    path = hybrids["qwen3_next"]
    tensors, raw = contents(path)
    # The last layer is recurrent, and the MTP layer is not.
    raw["layer_types"] = [*["full_attention"] * 3, "linear_attention"]
    save_tensors(path / "other", {}, raw)
    for own in (load_model_config(path), load_model_config(path / "other")):
        [layer] = load_mtp_head(path, own, FLOAT32).config.layers
        assert isinstance(layer.mixer, AttentionConfig) and layer.mixer.gated
        assert isinstance(layer.mlp, ExpertsConfig) and layer.mlp.shared_gate


def test_layers_beside_recurrent_ones_alone_and_none(hybrids: dict[str, Path], tmp_path: Path):
    path = hybrids["qwen3_5_text"]
    assert choose_drafter(path, "auto") == "mtp:after"
    drafter: Any = load(path).drafter
    assert drafter.head.method == "mtp" and drafter.capture == (FINAL_NORM,)
    config, (tensors, raw) = load_model_config(path), contents(path)
    mtp = {name: x for name, x in tensors.items() if name.startswith("mtp.")}
    assert holds_only_mtp_layers(save_tensors(tmp_path / "mtp", mtp, raw))
    alone = load_mtp_head(tmp_path / "mtp", config, FLOAT32)
    np.testing.assert_array_equal(alone.front.fc.weight, drafter.head.front.fc.weight)
    rest = {name: x for name, x in tensors.items() if name not in mtp}
    save_tensors(tmp_path / "none", rest, raw)
    assert not has_mtp_layers(tmp_path / "none", config)
    with pytest.raises(ValueError, match=r"no tensors mtp\.\*, though its config.json says"):
        load_mtp_head(tmp_path / "none", config, FLOAT32)
    save_tensors(tmp_path / "none", rest, raw | {"mtp_num_hidden_layers": 0})
    with pytest.raises(ValueError, match="no num_nextn_predict_layers or mtp_num_hidden_layers"):
        load_mtp_head(tmp_path / "none", config, FLOAT32)
