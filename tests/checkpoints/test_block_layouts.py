"""Block heads in the spelling of several publishers: the same head, or refused in their words."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoints.block import (
    check_block_copies,
    holds_block_head,
    load_block_head,
    save_block_head,
)
from jaxspec.checkpoints.safetensors_io import save_decoder
from jaxspec.config.model import ModelConfig
from jaxspec.models.from_config.block_head import block_config
from jaxspec.models.from_config.block_layouts import says_block
from jaxspec.models.from_config.model import load_model_config, read_json
from tests.helpers.block_checkpoints import MASK, RANK, published_head
from tests.helpers.block_heads import KINDS, arrays_equal
from tests.helpers.checkpoints import changed_copy, save_tensors
from tests.helpers.random_models import random_target, tiny_config

FLOAT32 = jnp.dtype("float32")
COPIES = {"embed_tokens.weight", "lm_head.weight"}
FORMAT = {"block_size", "num_target_layers", "dflash_config"}
OPTIONS = {
    "block_size", "target_layer_ids", "mask_token_id", "num_anchors", "markov_rank",
    "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
}  # fmt: skip


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    save_decoder(random_target(tiny_config(vocab_size=257, hidden_size=64)), directory)
    return directory


@pytest.fixture(scope="module")
def target(target_dir: Path) -> ModelConfig:
    return load_model_config(target_dir)


@pytest.fixture(scope="module")
def heads(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: published_head(tmp_path_factory.mktemp(kind), target_dir, kind) for kind in KINDS}


def of_specforge(config: dict[str, Any]) -> dict[str, Any]:
    """DeepSpec's config.json of a DSpark head as SpecForge writes it."""
    moved = OPTIONS - {"block_size"}
    nested = {key: config[key] for key in moved} | {"confidence_head_alpha": 1.0}
    nested |= {"attention_mode": "gqa", "projector_type": "dspark"}
    return {key: value for key, value in config.items() if key not in moved} | {
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        "dflash_config": nested,
        "target_hidden_size": None,
    }


def of_speculators(config: dict[str, Any]) -> dict[str, Any]:
    """The same as vLLM's speculators library writes it."""
    unnamed = {"target_layer_ids", "num_anchors"}
    return {key: config[key] for key in OPTIONS - unnamed} | {
        "architectures": ["DSparkDraftModel"],
        "aux_hidden_state_layer_ids": [i + 1 for i in config["target_layer_ids"]],
        "draft_vocab_size": config["vocab_size"],
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "speculators_config": {"algorithm": "dspark", "proposal_methods": []},
        "speculators_model_type": "dspark",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {key: config[key] for key in config.keys() - OPTIONS - FORMAT},
    }


def rewritten(directory: Path, to: Path, spell: Any, **tensors: Any) -> Path:
    """A copy of a head with its config.json in another spelling, without copied tables."""
    kept = load_file(directory / "model.safetensors") | tensors
    kept = {name: one for name, one in kept.items() if one is not None and name not in COPIES}
    return save_tensors(to, kept, spell(read_json(directory / "config.json")))


def of_modelopt(config: dict[str, Any]) -> dict[str, Any]:
    """The same as ModelOpt writes it."""
    moved = {"enable_confidence_head", "confidence_head_with_markov", "num_anchors"}
    nested = {key: config[key] for key in OPTIONS - moved - {"block_size"}}
    nested |= {"projector_type": "dspark", "shift_label": True, "use_confidence_head": True}
    return {key: value for key, value in config.items() if key not in OPTIONS} | {
        "architectures": ["DFlashDraftModel"],
        "block_size": config["block_size"],
        "dflash_config": nested,
    }


def of_torchspec(config: dict[str, Any]) -> dict[str, Any]:
    """z-lab's config.json of a DFlash head as TorchSpec writes it, but for its block size."""
    unnamed = {*FORMAT, "layer_types", "max_window_layers", "head_dim", "auto_map"}
    return {key: value for key, value in config.items() if key not in unnamed} | {
        **config["dflash_config"],
        "model_type": "dflash",
        "target_hidden_size": config["hidden_size"],
        "target_num_hidden_layers": config["num_target_layers"],
        "num_target_layers": len(config["dflash_config"]["target_layer_ids"]),
    }


def test_a_dspark_head_of_modelopt(heads: dict[str, Path], target: ModelConfig, tmp_path: Path):
    own = load_file(heads["dspark"] / "model.safetensors")
    prefixes = {"markov_head.": "", "confidence_head.": "confidence_"}
    moved: dict[str, Any] = {}
    for name, tensor in own.items():
        for prefix, new in prefixes.items():
            if name.startswith(prefix):
                moved |= {name: None, new + name.removeprefix(prefix): tensor}
    directory = rewritten(heads["dspark"], tmp_path / "in", of_modelopt, **moved)
    head = load_block_head(directory, target, FLOAT32)
    assert arrays_equal(head, load_block_head(heads["dspark"], target, FLOAT32))
    both: dict[str, Any] = {"markov_head.markov_w1.weight": np.ones((257, RANK))}
    twice = changed_copy(directory, tmp_path / "twice", **both)
    with pytest.raises(ValueError, match="which are names of one tensor"):
        load_block_head(twice, target, FLOAT32)


def test_a_dflash_head_of_torchspec(heads: dict[str, Path], target: ModelConfig, tmp_path: Path):
    own = load_file(heads["dflash"] / "model.safetensors")
    renamed = {"fc": "context_proj", "hidden_norm": "context_norm", "norm": "final_norm"}
    moved: dict[str, Any] = {f"{old}.weight": None for old in renamed}
    moved |= {f"{new}.weight": own[f"{old}.weight"] for old, new in renamed.items()}
    directory = rewritten(heads["dflash"], tmp_path, of_torchspec, **moved)
    head = load_block_head(directory, target, FLOAT32)
    assert head.block_size == 16, "the trainer's default, as the file does not say it"
    theirs = load_block_head(heads["dflash"], target, FLOAT32)
    assert arrays_equal(head.replace(block_size=6), theirs)


@pytest.mark.parametrize("spell", [of_specforge, of_speculators])
def test_a_dspark_head_is_the_same_in_every_spelling(
    spell: Any, heads: dict[str, Path], target: ModelConfig, tmp_path: Path
):
    directory = rewritten(heads["dspark"], tmp_path, spell)
    assert holds_block_head(directory)
    head = load_block_head(directory, target, FLOAT32)
    assert arrays_equal(head, load_block_head(heads["dspark"], target, FLOAT32))


def test_a_dflash_head_of_the_speculators_library(
    heads: dict[str, Path], target: ModelConfig, tmp_path: Path
):
    own = read_json(heads["dflash"] / "config.json")
    layers = {key: own[key] for key in own.keys() - {"architectures", "auto_map", *FORMAT}}
    raw = {
        "architectures": ["DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [0, 1],
        "block_size": own["block_size"],
        "mask_token_id": MASK,
        "speculators_model_type": "dflash",
        "transformer_layer_config": layers | {"model_type": "llama"},
    }
    tables = {"d2t": np.zeros(257, np.int64), "t2d": np.ones(257, bool)}
    directory = rewritten(heads["dflash"], tmp_path / "in", lambda _: raw, **tables)
    head = load_block_head(directory, target, FLOAT32)
    assert arrays_equal(head, load_block_head(heads["dflash"], target, FLOAT32))
    moved = changed_copy(directory, tmp_path / "moved", d2t=np.ones(257, np.int64))
    with pytest.raises(ValueError, match="d2t says that draft ids are not the target's"):
        load_block_head(moved, target, FLOAT32)


def test_a_reduced_vocabulary(heads: dict[str, Path], target: ModelConfig, tmp_path: Path):
    """Draft ids stand for every third id of the target; logits are those of the head's LM head."""
    ids = np.arange(0, 257, 3)
    lm_head = np.random.default_rng(3).standard_normal((ids.size, 64)).astype(np.float32)
    tables: dict[str, Any] = {"d2t": ids - np.arange(ids.size), "t2d": np.arange(257) % 3 == 0}
    fields = {"draft_vocab_size": ids.size}
    directory = changed_copy(
        heads["dflash"], tmp_path / "in", fields, **{"lm_head.weight": lm_head}, **tables
    )
    head = load_block_head(directory, target, FLOAT32)
    assert head.token_ids is not None
    np.testing.assert_array_equal(head.token_ids, ids)
    model = random_target(tiny_config(vocab_size=257, hidden_size=64))
    outputs = np.random.default_rng(4).standard_normal((1, 2, 64)).astype(np.float32)
    ours = head.logits(model, jnp.asarray(outputs))
    np.testing.assert_allclose(ours, outputs @ lm_head.T, rtol=0, atol=1e-4)
    assert head.vocab_layout(model).vocab == ()
    save_block_head(head, tmp_path / "out", model)
    assert arrays_equal(load_block_head(tmp_path / "out", target, FLOAT32), head)
    check_block_copies(tmp_path / "out", tmp_path)  # its LM head is not the target's
    first = {"d2t": np.zeros(86, np.int64), "t2d": np.arange(257) < 86}
    save_decoder(model, tmp_path / "model")
    check_block_copies(changed_copy(directory, tmp_path / "first", **first), tmp_path / "model")
    for name, message in (
        ("d2t", "needs a tensor d2t of [86] integers"),
        ("lm_head.weight", "lm_head.weight is missing"),
    ):
        without = changed_copy(directory, tmp_path / name, **{name: None})
        with pytest.raises(ValueError) as caught:
            load_block_head(without, target, FLOAT32)
        assert message in str(caught.value)


def test_newer_files_have_block_size_among_the_options(
    heads: dict[str, Path], target: ModelConfig, tmp_path: Path
):
    own = read_json(heads["dflash"] / "config.json")
    nested = own.pop("dflash_config") | {"block_size": own.pop("block_size")}
    raw = own | {"dflash_config": nested, "draft_vocab_size": 257, "is_causal": False}
    head = load_block_head(rewritten(heads["dflash"], tmp_path, lambda _: raw), target, FLOAT32)
    assert arrays_equal(head, load_block_head(heads["dflash"], target, FLOAT32))


@pytest.mark.parametrize(
    ("spell", "fields", "message"),
    [
        (of_modelopt, {"dflash_config": {"projector_type": "dspark", "use_confidence_head": True,
         "shift_label": False}}, "shift_label = False is not supported for a DSpark head"),
        (of_modelopt, {"dflash_config": {"projector_type": "dflare"}},
         "projector_type 'dflare' is not a supported block drafter, only dflash, domino, lilicorr"),
        (of_specforge, {"dflash_config": None}, "dflash_config must be an object, got None"),
        (of_specforge, {"draft_vocab_size": 258},
         "draft_vocab_size must be an integer from 1 to the target's vocabulary of 257, got 258"),
        (of_specforge, {"target_hidden_size": 128}, "its target_hidden_size is 128, not 64"),
        (of_specforge, {"block_size": 5, "dflash_config": {"block_size": 6}},
         "block_size is 6 inside dflash_config, and 5 beside it"),
        (of_specforge, {"is_causal": 1}, "is_causal must be true or false, got 1"),
        (of_speculators, {"sliding_window_non_causal": 0}, "_non_causal must be true or false"),
        (of_speculators, {"speculators_model_type": "dflash9"}, "'dflash9' is not a supported"),
        (of_speculators, {"aux_hidden_state_layer_ids": [1, 3]},
         "aux_hidden_state_layer_ids must be increasing layers from 0 to 2, got"),
        (of_speculators, {"sample_from_anchor": False}, "sample_from_anchor = False is not supp"),
        (of_speculators, {"architectures": ["OtherSpeculator"]}, "is not a supported block dr"),
        (of_speculators, {"transformer_layer_config": 3}, "config must be an object, got 3"),
        (of_speculators, {"num_jacobi_passes": 6}, "unknown key 'num_jacobi_passes'"),
    ],
)  # fmt: skip
def test_spellings_that_are_refused(
    spell: Any, fields: dict[str, Any], message: str, heads: dict[str, Path], target: ModelConfig
):
    raw = spell(read_json(heads["dspark"] / "config.json")) | fields
    assert says_block(raw)
    with pytest.raises(ValueError) as caught:
        block_config(raw, target)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_all_that_is_wrong_is_named_at_once(heads: dict[str, Path], target: ModelConfig):
    wrong = {"block_size": 0, "mask_token_id": 999, "target_layer_ids": [7], "markov_rank": -1}
    raw = read_json(heads["dspark"] / "config.json") | wrong | {"num_attention_heads": 0}
    with pytest.raises(ValueError) as caught:
        block_config(raw, target)
    assert all(name in str(caught.value) for name in (*wrong, "num_attention_heads"))
