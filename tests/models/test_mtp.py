"""Layers for multi-token prediction: which draft, what they change, and checkpoints' names."""

import dataclasses
import json
import operator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec import LLM, SamplingParams, SpeculationConfig, load
from jaxspec.checkpoints.load_drafter import choose_drafter
from jaxspec.checkpoints.mtp import (
    MtpChoice,
    has_mtp_layers,
    holds_only_mtp_layers,
    load_mtp_head,
    load_mtp_heads,
    save_mtp_head,
)
from jaxspec.checkpoints.safetensors_io import load_decoder
from jaxspec.config.experts import ExpertsConfig
from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.mtp import (
    AFTER,
    ALL_MTP_STATES,
    BEFORE,
    BEFORE_AFTER,
    MtpConfig,
    MtpStates,
)
from jaxspec.models.decoder import FINAL_NORM
from jaxspec.models.from_config.model import load_model_config, parse_model_config
from jaxspec.models.heads import mtp_states
from jaxspec.models.json.values import read_json
from jaxspec.parallel import make_mesh
from jaxspec.scheduling.plan import Limits
from jaxspec.training.heads.step import DraftTrainConfig
from jaxspec.training.online import HeadAdapter
from tests.helpers import parity
from tests.helpers.checkpoints import (
    add_mtp_layer,
    changed_copy,
    hf_logits,
    save_byte_tokenizer,
    save_tensors,
    tiny_llama,
    tiny_qwen2,
)
from tests.helpers.hybrid_checkpoints import contents, save_hybrid
from tests.helpers.mtp_families import save_with_mtp

FLOAT32 = jnp.dtype("float32")
COUNT = 3  # of several layers
TOKENS = np.random.default_rng(0).integers(0, 257, (2, 13))
PROMPTS = [np.random.default_rng(1).integers(0, 257, 23).tolist(), TOKENS[1, :4].tolist()]
SMALL: dict[str, Any] = {"vocab_size": 257, "num_hidden_layers": 2}
NAME_OF = operator.attrgetter("name")
CHAIN, TREE = SpeculationConfig.chain(3), SpeculationConfig(num_nodes=8, max_depth=3, top_k=2)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By layout; with a number, of so many MTP layers."""
    made = {}
    for layout, make in (("deepseek", tiny_llama), ("mimo", tiny_qwen2)):
        for count, name in ((1, layout), (COUNT, f"{layout} {COUNT}")):
            made[name] = make(tmp_path_factory.mktemp(layout), **SMALL)
            add_mtp_layer(made[name], layout, count=count)
            save_byte_tokenizer(made[name])
    return made


def texts(path: Path, drafter: str, **options: Any) -> tuple[list[list[int]], list[list[float]]]:
    """And how many rounds of each text accepted a draft at each depth."""
    llm = LLM(path, drafter, **{"dtype": "float32", "max_length": 64} | options)
    sampling = [
        SamplingParams(max_tokens=36, temperature=0.7 * seed, seed=seed, ignore_eos=True)
        for seed in (0, 1)
    ]
    outputs = llm.generate(PROMPTS, sampling)
    accepted = [[one.num_rounds * share for share in one.acceptance_by_depth] for one in outputs]
    if drafter != "none":
        assert min(own[0] for own in accepted) > 4, "hardly a draft was accepted"
    return [one.token_ids for one in outputs], accepted


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By number of MTP layers: checkpoints of MiMo whose layers guess well."""
    made = {}
    for count in (1, COUNT):
        path, sizes = tmp_path_factory.mktemp("drafting"), {"vocab_size": 257, "hidden_size": 64}
        made[count] = save_with_mtp(path, "mimo", context=0.1, count=count, **sizes)
        save_byte_tokenizer(made[count])
    return made


@pytest.mark.slow  # test_several_heads.py and test_families_under_load.py are quicker
@pytest.mark.parametrize("name", ["mtp", *(f"mtp:{one.name}" for one in ALL_MTP_STATES)])
def test_what_the_layers_read_never_changes_the_text(name: str, drafting: dict[int, Path]):
    plain, _ = texts(drafting[1], "none")
    assert texts(drafting[1], name, speculation=CHAIN)[0] == plain


@pytest.mark.slow
@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])  # the MTP layer
@pytest.mark.parametrize("devices", [2, 4])  # on four, KV heads are repeated
def test_devices_give_the_text_of_one(devices: int, split: bool, drafting: dict[int, Path]):
    """And draft as well as one does."""
    path, mesh = drafting[1], make_mesh(tensor_parallel=devices)
    found, accepted = texts(path, "mtp", speculation=TREE, mesh=mesh, shard_drafter=split)
    assert found == texts(path, "none")[0]
    assert accepted == texts(path, "mtp", speculation=TREE)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("mtp", {}),
        ("mtp:after-before:2", {"speculation": SpeculationConfig.chain(4)}),
        ("ngram+mtp", {"page_size": 5}),
        ("mtp", {"drafter_bits": 8}),
        ("mtp", {"kv_dtype": "fp8"}),
        ("mtp", {"mesh": {"tensor_parallel": 2}}),
        ("mtp", {"mesh": {"tensor_parallel": 2}, "shard_drafter": True}),
        ("mtp", {"mesh": {"data_parallel": 2}}),
        ("mtp", {"mesh": {"pipeline_parallel": 2}, "stage_layers": (1, 1)}),
    ],
)
def test_texts_of_several_layers_are_those_of_plain_decoding(
    drafter: str, options: dict[str, Any], drafting: dict[int, Path]
):
    options = {"speculation": TREE} | options
    if "mesh" in options:
        options["mesh"] = make_mesh(**options["mesh"])
    same = {name: options[name] for name in ("kv_dtype",) if name in options}
    found, accepted = texts(drafting[COUNT], drafter, **options)
    assert found == texts(drafting[COUNT], "none", **same)[0]
    assert (np.sum([own[:COUNT] for own in accepted], axis=0) > 4).all(), "later ones hardly draft"


def test_the_body_of_mimo_has_the_logits_of_qwen2(tmp_path: Path):
    path = tiny_qwen2(tmp_path, **SMALL)
    expected = hf_logits(path, TOKENS)
    add_mtp_layer(path, "mimo")
    assert read_json(path / "config.json")["model_type"] == "mimo"
    parity.assert_close(parity.paged_logits(parity.load(path), TOKENS, 3, 1), expected)


def test_layers_that_the_config_of_mimo_does_not_count_are_left_out(
    checkpoints: dict[str, Path], tmp_path: Path
):
    none = changed_copy(checkpoints["mimo"], tmp_path, {"num_nextn_predict_layers": 0})
    config = load_model_config(none)
    assert config.mtp is None and not has_mtp_layers(none, config)
    load_decoder(none, config, FLOAT32)


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


# Several layers.


def test_the_choice_of_layers_is_named(checkpoints: dict[str, Path]):
    path = checkpoints["deepseek 3"]
    assert choose_drafter(path, "auto") == "mtp:after:3"
    assert choose_drafter(path, "mtp:before") == "mtp:before:3"
    assert choose_drafter(path, "ngram+mtp:1") == "ngram+mtp:after:1"
    assert choose_drafter(checkpoints["mimo 3"], "mtp") == "mtp:before-after:3"
    config = load_model_config(path)
    for name, depth, count in (
        ("mtp", 5, 3),
        ("mtp", 2, 2),
        ("mtp:1", 5, 1),
        ("mtp:after:2", 5, 2),
    ):
        drafter: Any = load(path, name, speculation=SpeculationConfig.chain(depth)).drafter
        assert len(drafter.heads) == drafter.num_reread_tokens == count
        assert drafter.capture == (FINAL_NORM,)
    one, two, three = load_mtp_heads(path, config, FLOAT32)
    stored = load_file(path / "model.safetensors")
    for layer, head in enumerate((one, two, three), start=config.num_layers):
        kept: Any = head.front
        weight = stored[f"model.layers.{layer}.eh_proj.weight"].T
        np.testing.assert_array_equal(kept.fc.weight, weight)


def test_what_is_not_supported_is_named(checkpoints: dict[str, Path], tmp_path: Path):
    path = checkpoints["deepseek 3"]
    with pytest.raises(ValueError, match="4 MTP layers are asked for, and the checkpoint has 3"):
        load(path, "mtp:4")
    for name in ("mtp:0", "mtp:1:after", "mtp:after:", "mtp:first", "mtp:after-after"):
        with pytest.raises(
            ValueError, match="come :before, :after, :before-after or :after-before, and"
        ):
            load(path, name)
    config = path / "config.json"
    raw = json.loads(config.read_text())
    stored = load_file(path / "model.safetensors")
    save_tensors(tmp_path, stored, raw | {"num_nextn_predict_layers": 4})
    with pytest.raises(ValueError, match=r"no tensors model.layers.5\.\*, though its config.json"):
        load(tmp_path, "mtp", speculation=SpeculationConfig.chain(4))
    assert load(tmp_path, "mtp:3").drafter.num_reread_tokens == 3
    recurrent = parse_model_config({"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 2})
    with pytest.raises(ValueError, match="a model with recurrent layers only one can draft"):
        load_mtp_heads(path, recurrent, FLOAT32)
    raw = {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 2}
    save_tensors(tmp_path, stored, raw)
    with pytest.raises(ValueError, match="2 MTP layers that share a projection only the first"):
        load_mtp_heads(tmp_path, recurrent, FLOAT32, choice=MtpChoice(count=2))
    llm = LLM(path, "mtp", dtype="float32", max_length=64)
    with pytest.raises(ValueError, match="only one head learns while it serves"):
        HeadAdapter(llm, DraftTrainConfig(), length=32)
    sizes: dict[str, Any] = {"num_rows": 1, "num_pages": 9, "page_size": 8, "max_length": 64}
    sizes |= {"scratch_slots": 4, "tokens_per_round": 2, "share_pages": False, "snapshots": 1}
    with pytest.raises(ValueError, match="reads the last 3 tokens of a cached prefix again"):
        Limits(**sizes, prefix_tokens_read_again=3)


def test_layers_by_themselves_draft_together(checkpoints: dict[str, Path], tmp_path: Path):
    path = checkpoints["mimo 3"]
    stored = load_file(path / "model.safetensors")
    own = {name: one for name, one in stored.items() if ".mtp_layers." in name}
    save_tensors(tmp_path, own, json.loads((path / "config.json").read_text()))
    alone: Any = load(path, tmp_path).drafter
    assert len(alone.heads) == 3
    expected: Any = load(path, "mtp").drafter
    for one, other in zip(*map(jax.tree.leaves, (alone, expected)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_number_of_layers_is_checked_before_it_becomes_a_name():
    one, shared = MtpConfig("deepseek", 1, AFTER), MtpConfig("qwen", 2, AFTER)
    assert MtpChoice(count=1).name(one) == "mtp:after"
    with pytest.raises(ValueError, match="2 MTP layers are asked for, and the checkpoint has 1"):
        MtpChoice(count=2).name(one)
    assert MtpChoice().name(shared) == "mtp:after:1"  # what ``auto`` takes
    with pytest.raises(ValueError, match="choose it by the drafter mtp:1"):
        MtpChoice(count=2).name(shared)


@pytest.fixture
def with_copies(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A DeepSeek layout with one MTP layer, and its tensors; the layer repeats the tables."""
    path = tiny_llama(tmp_path, **SMALL)
    add_mtp_layer(path, "deepseek", count=1)
    tensors = load_file(path / "model.safetensors")
    tables = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    for own, of_target in tables.items():
        tensors[f"model.layers.2.{own}.weight"] = tensors[f"{of_target}.weight"]
    return path, tensors


def load_from(path: Path, tensors: dict[str, Any]) -> Any:
    save_tensors(path, tensors, json.loads((path / "config.json").read_text()))
    return load_mtp_heads(path, load_model_config(path), FLOAT32)


def test_copies_of_the_targets_tables_are_fine(with_copies):
    assert len(load_from(*with_copies)) == 1


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_tables_of_the_layers_own_are_reported(with_copies, name: str):
    path, tensors = with_copies
    own = f"model.layers.2.{name}.weight"
    tensors[own] = tensors[own] + 1
    with pytest.warns(UserWarning, match=f"{own} differs from .*, which is read in its place"):
        load_from(path, tensors)
    tensors[own] = tensors[own][:5]
    with pytest.raises(ValueError, match=rf"{own} is \(5, "):
        load_from(path, tensors)


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
        assert isinstance(layer.mixer, AttentionConfig) and layer.mixer.gate == "entries"
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
