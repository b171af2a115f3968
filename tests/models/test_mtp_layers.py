"""Checkpoints with several MTP layers: choices among them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec import LLM, SamplingParams, SpeculationConfig, load
from jaxspec.checkpoints.load_drafter import choose_drafter
from jaxspec.checkpoints.mtp import MtpChoice, load_mtp_heads
from jaxspec.config.mtp import AFTER, MtpConfig
from jaxspec.models.decoder import FINAL_NORM
from jaxspec.models.from_config.model import load_model_config, parse_model_config
from jaxspec.parallel import make_mesh
from jaxspec.scheduling.plan import Limits
from jaxspec.training.heads.step import DraftTrainConfig
from jaxspec.training.online import HeadAdapter
from tests.helpers.checkpoints import (
    add_mtp_layer,
    save_byte_tokenizer,
    save_tensors,
    tiny_llama,
    tiny_qwen2,
)
from tests.helpers.mtp_families import save_with_mtp

FLOAT32 = jnp.dtype("float32")
COUNT = 3
SMALL: dict[str, Any] = {"vocab_size": 257, "num_hidden_layers": 2}
PROMPTS = [np.random.default_rng(seed).integers(0, 257, size) for seed, size in ((1, 23), (2, 4))]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {
        "deepseek": tiny_llama(tmp_path_factory.mktemp("deepseek"), **SMALL),
        "mimo": tiny_qwen2(tmp_path_factory.mktemp("mimo"), **SMALL),
    }
    for layout, path in made.items():
        add_mtp_layer(path, layout, count=COUNT)
        save_byte_tokenizer(path)
    return made


def test_the_choice_of_layers_is_named(checkpoints: dict[str, Path]):
    path = checkpoints["deepseek"]
    assert choose_drafter(path, "auto") == "mtp:after:3"
    assert choose_drafter(path, "mtp:before") == "mtp:before:3"
    assert choose_drafter(path, "ngram+mtp:1") == "ngram+mtp:after:1"
    assert choose_drafter(checkpoints["mimo"], "mtp") == "mtp:before-after:3"
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
    path = checkpoints["deepseek"]
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
        load(tmp_path, "mtp")
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


def texts(path: Path, drafter: str, **options: Any) -> list[list[int]]:
    llm = LLM(path, drafter, **{"dtype": "float32", "max_length": 64} | options)
    prompts = [prompt.tolist() for prompt in PROMPTS]
    sampling = [SamplingParams(temperature=0.7 * i, seed=3, max_tokens=36) for i in range(2)]
    outputs = llm.generate(prompts, sampling)
    if drafter != "none":
        accepted = [one.num_rounds * np.array(one.acceptance_by_depth[:3]) for one in outputs]
        assert (np.sum(accepted, axis=0) > 4).all(), "later layers hardly draft"
    return [one.token_ids for one in outputs]


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose three layers guess well."""
    path, sizes = tmp_path_factory.mktemp("drafting"), {"vocab_size": 257, "hidden_size": 64}
    save_with_mtp(path, "mimo", context=0.1, count=COUNT, **sizes)
    save_byte_tokenizer(path)
    return path


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
def test_texts_are_those_of_plain_decoding(drafter: str, options: dict[str, Any], drafting: Path):
    path, tree = drafting, SpeculationConfig(num_nodes=8, max_depth=3, top_k=2)
    options = {"speculation": tree} | options
    if "mesh" in options:
        options["mesh"] = make_mesh(**options["mesh"])
    same = {name: options[name] for name in ("kv_dtype",) if name in options}
    assert texts(path, drafter, **options) == texts(path, "none", **same)


def test_layers_by_themselves_draft_together(checkpoints: dict[str, Path], tmp_path: Path):
    path = checkpoints["mimo"]
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
