"""The tokenizer's end token, in the places where published files have it."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec.models.from_config.model import load_model_config
from tests.helpers.checkpoints import TINY

CONFIG = TINY | {"model_type": "llama", "rms_norm_eps": 1e-5, "eos_token_id": 7}
ADDED = {"id": 9, "content": "<|im_end|>"}
NAMED = {"tokenizer_config.json": {"eos_token": "<|im_end|>"}}


@pytest.mark.parametrize(
    ("files", "stops"),
    [
        (NAMED | {"tokenizer.json": {"added_tokens": [{"id": 8, "content": "a"}, ADDED]}}, (7, 9)),
        (NAMED | {"tokenizer.json": {"model": {"vocab": {"a": 0, "<|im_end|>": 9}}}}, (7, 9)),
        (NAMED | {"tokenizer.json": {"model": {"vocab": [["<|im_end|>", 0.0], ["a", 1]]}}}, (7, 0)),
        (NAMED | {"added_tokens.json": {"<|im_end|>": 9}}, (7, 9)),
        (NAMED | {"vocab.json": {"<|im_end|>": 7}}, (7,)),
        (
            {
                "tokenizer_config.json": {
                    "eos_token": {"content": "<|im_end|>", "lstrip": False},
                    "added_tokens_decoder": {"9": {"content": "<|im_end|>"}, "x": {}, "8": None},
                }
            },
            (7, 9),
        ),
        (
            {
                "tokenizer_config.json": {},
                "special_tokens_map.json": {"eos_token": "<|im_end|>"},
                "tokenizer.json": {"added_tokens": [ADDED]},
            },
            (7, 9),
        ),
        (NAMED | {"added_tokens.json": {"<|im_end|>": TINY["vocab_size"]}}, (7,)),  # beyond it
        (NAMED | {"added_tokens.json": {"<|im_end|>": -1}}, (7,)),
        (NAMED | {"tokenizer.json": {"added_tokens": 5, "model": {"vocab": None}}}, (7,)),
        (NAMED, (7,)),
        ({"tokenizer_config.json": {"eos_token": None}}, (7,)),
        ({"tokenizer_config.json": {"eos_token": 9}}, (7,)),
        ({"tokenizer.json": {"added_tokens": [ADDED]}}, (7,)),
    ],
)
def test_the_tokenizers_end_token_is_a_stop_token(
    tmp_path: Path, files: dict[str, Any], stops: tuple[int, ...]
):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert load_model_config(tmp_path).stop_token_ids == stops


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_what_is_no_json_is_refused_by_its_name(tmp_path: Path, name: str):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_text("{")
    with pytest.raises(ValueError, match=rf"{name} cannot be read as JSON: [^\n]+$"):
        load_model_config(tmp_path)
