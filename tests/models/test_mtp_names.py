"""MTP layers whose tensors have names of their own, those of ERNIE 4.5 and Hy3, and EXAONE 4.5's.

test_mtp_parity.py compares what they compute with transformers' layers.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec import LLM, SamplingParams, SpeculationConfig
from jaxspec.checkpoints.load_drafter import choose_drafter
from jaxspec.checkpoints.mtp import has_mtp_layers, load_mtp_head, save_mtp_head
from jaxspec.models.from_config.model import (
    load_model_config,
    parse_model_config,
    with_mtp_layer,
)
from jaxspec.models.json.mtp_names import NORM
from jaxspec.models.json.values import read_json
from tests.helpers.alias_checkpoints import raw_config
from tests.helpers.checkpoints import (
    add_mtp_layer,
    changed_copy,
    save_byte_tokenizer,
    within_images,
)
from tests.helpers.families import save_family

FLOAT32 = jnp.dtype("float32")
LAYOUTS = {"hy_v3": "hy3", "ernie4_5_moe": "ernie", "exaone4_5": "qwen"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family, with an MTP layer as published."""
    made = {}
    for name, layout in LAYOUTS.items():
        path = tmp_path_factory.mktemp(name)
        text = "exaone4" if name == "exaone4_5" else name
        save_family(path, text, vocab_size=257, tie_word_embeddings=False, eos_token_id=2)
        made[name] = add_mtp_layer(path, layout)
        if name == "exaone4_5":
            within_images(path, name, "Exaone4_5_ForConditionalGeneration")
        save_byte_tokenizer(path)
    return made


def same(one: Any, other: Any) -> bool:
    return all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layer_is_saved_and_loaded_by_itself(
    name: str, checkpoints: dict[str, Path], tmp_path: Path
):
    config = load_model_config(checkpoints[name])
    head = load_mtp_head(checkpoints[name], config, FLOAT32)
    save_mtp_head(head, tmp_path, read_json(checkpoints[name] / "config.json"))
    assert same(load_mtp_head(tmp_path, config, FLOAT32), head)


def test_the_last_norm_of_ernies_layer_is_the_models(checkpoints: dict[str, Path]):
    path = checkpoints["ernie4_5_moe"]
    head = load_mtp_head(path, load_model_config(path), FLOAT32)
    np.testing.assert_array_equal(head.norm, load_file(path / "model.safetensors")[NORM])


def test_an_lm_head_of_hy3s_layer_is_compared_with_the_models(
    checkpoints: dict[str, Path], tmp_path: Path
):
    name, config = "model.layers.2.shared_head.weight", load_model_config(checkpoints["hy_v3"])
    own = load_file(checkpoints["hy_v3"] / "model.safetensors")[name] + 1
    changed: dict[str, Any] = {name: own}
    changed_copy(checkpoints["hy_v3"], tmp_path, **changed)
    with pytest.warns(UserWarning, match="shared_head"):
        load_mtp_head(tmp_path, config, FLOAT32)


def test_a_layer_that_the_files_lack_is_named(checkpoints: dict[str, Path], tmp_path: Path):
    stored = load_file(checkpoints["ernie4_5_moe"] / "model.safetensors")
    without: dict[str, Any] = {name: None for name in stored if ".mtp_" in name}
    path = changed_copy(checkpoints["ernie4_5_moe"], tmp_path, **without)
    config = load_model_config(path)
    assert config.mtp is not None and not has_mtp_layers(path, config)
    with pytest.raises(ValueError, match=r"no tensors model\.mtp\.0\.\*, though its config"):
        load_mtp_head(path, config, FLOAT32)


def test_exaones_layer_is_like_the_models_first(checkpoints: dict[str, Path], tmp_path: Path):
    path = checkpoints["exaone4_5"]
    config = load_model_config(path)
    first, last = config.layers  # of which the first alone has a window
    assert first != last and load_mtp_head(path, config, FLOAT32).config.layers == (first,)
    assert choose_drafter(path, "auto") == "mtp:after"


@pytest.mark.parametrize("beside", [True, False])
def test_the_number_of_exaones_layers_may_stand_in_either_config(beside: bool):
    raw = raw_config("exaone4_5")
    assert parse_model_config(raw).mtp is not None  # one, if nothing says how many
    where = raw if beside else raw["text_config"]
    where["num_nextn_predict_layers"] = 0
    assert parse_model_config(raw).mtp is None
    where["num_nextn_predict_layers"] = 2
    one = with_mtp_layer(raw)
    assert (found := parse_model_config(one).mtp) is not None and found.num_layers == 1


def test_numbers_of_exaones_layers_that_cannot_be_are_named():
    raw = raw_config("exaone4_5")
    with pytest.raises(ValueError, match="num_nextn_predict_layers 9: the model, whose first lay"):
        parse_model_config({**raw, "num_nextn_predict_layers": 9})
    inside = {**raw["text_config"], "num_nextn_predict_layers": 0}
    with pytest.raises(ValueError, match="num_nextn_predict_layers = 0 contradicts that beside"):
        parse_model_config({**raw, "text_config": inside, "num_nextn_predict_layers": 1})


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_texts_are_those_of_plain_decoding(name: str, shape: str, checkpoints: dict[str, Path]):
    tree = SpeculationConfig(num_nodes=8, max_depth=3, top_k=2)
    speculation = SpeculationConfig.chain(3) if shape == "chain" else tree
    sampling = [
        SamplingParams(max_tokens=24, temperature=0.7 * seed, seed=seed, ignore_eos=True)
        for seed in (0, 1)
    ]
    prompts = [[1, 7, 9, 40, 7], [3]]

    def texts(drafter: str, **options: Any) -> list[list[int]]:
        llm = LLM(checkpoints[name], drafter, dtype="float32", max_length=64, **options)
        return [one.token_ids for one in llm.generate(prompts, sampling)]

    assert texts("mtp", speculation=speculation) == texts("none")
