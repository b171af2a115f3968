"""The text model of Gemma 3 with images, under both names that its tensors have in files."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file

from jaxspec.models.from_config.model import load_model_config
from jaxspec.models.json.values import read_json
from tests.helpers.checkpoints import TINY, hf_logits, save_random_model, save_tensors
from tests.helpers.marks import slow
from tests.helpers.parity import assert_close, load, paged_logits

TEXT: dict[str, Any] = TINY | {
    "num_hidden_layers": 2,
    "head_dim": 24,
    "query_pre_attn_scalar": 20,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_use_head": False,
}
# As Google published it, and as transformers has it in memory.
LAYOUTS = {
    "published": ("language_model.model.", "language_model.lm_head.", ""),
    "of transformers 5": ("model.language_model.", "lm_head.", "model."),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the text model alone."""
    config = transformers.Gemma3TextConfig(**TEXT, tie_word_embeddings=False)
    return save_random_model(tmp_path_factory.mktemp("text"), config)


def with_images(directory: Path, text: Path, layout: str) -> Path:
    """The same as part of a model of text and images."""
    body, head, images = LAYOUTS[layout]
    inner = read_json(text / "config.json")
    tensors = {
        name.replace("model.", body, 1) if name.startswith("model.") else f"{head}weight": value
        for name, value in load_file(text / "model.safetensors").items()
    }
    tensors |= {
        f"{images}{name}": np.ones((32, 64), np.float32)
        for name in (
            "multi_modal_projector.mm_input_projection_weight",
            "vision_tower.vision_model.encoder.layers.0.mlp.fc2.weight",
        )
    }
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": inner | {"architectures": None},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": 300,
        "tie_word_embeddings": False,
    }
    return save_tensors(directory, tensors, raw)


@pytest.mark.parametrize("layout", ["published", slow("of transformers 5")])
def test_it_is_the_text_model_alone_with_the_logits_of_transformers(
    text: Path, layout: str, tmp_path: Path
):
    whole = with_images(tmp_path, text, layout)
    assert load_model_config(whole) == load_model_config(text)
    groups = r"multi_modal_projector\.\*, .*vision_tower\.\*$"
    with pytest.warns(UserWarning, match=f"2 tensors are left out.*{groups}"):
        ours, alone = load(whole), load(text)
    assert all(map(np.array_equal, jax.tree.leaves(ours), jax.tree.leaves(alone)))
    tokens = np.random.default_rng(1).integers(0, 300, (2, 24))
    assert_close(paged_logits(ours, tokens, 5, 24), hf_logits(whole, tokens))


def test_the_config_of_transformers_is_read(tmp_path: Path):
    theirs = transformers.Gemma3Config(text_config=TEXT, vision_config=VISION)
    raw = theirs.to_dict() | {"architectures": ["Gemma3ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_model_config(tmp_path).num_layers == 2
