"""Tokenizers of GGUF files: how texts are split, what is whole, what begins a text.

Those of published models are in tests/real.
"""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from jaxspec.checkpoints.gguf.metadata import Metadata
from jaxspec.checkpoints.gguf.tokenizer import CONTROL, USER_DEFINED, tokenizer_files
from jaxspec.models.json.keys import words
from tests.helpers.tokenizer_texts import TEXTS

SUPPORTED = words("llama-bpe llama3 llama-v3 dbrx smaug-bpe tekken gpt-4o qwen2 deepseek-r1-qwen")
LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
THEIRS = {
    "gpt-2": GPT2,
    "phi-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    **{
        name: pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), LEVEL])
        for name, split in GGUF_PRE_TOKENIZER_SPLITS.items()
        if name in SUPPORTED
    },
}
PIECES = ["<unk>", "<s>", "</s>", "<|user|>", "  ", "\u2581", "a", "\u2581a"]
KINDS = [2, CONTROL, CONTROL, CONTROL, USER_DEFINED, 1, 1, 1]


def made(architecture: str, name: str = "", **fields: Any) -> Tokenizer:
    named = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    named |= {"general.architecture": architecture, "general.name": name}
    files = tokenizer_files(Metadata((Path("model.gguf"),), named, {}))
    return Tokenizer.from_str(files["tokenizer.json"])


def byte_level(pre: str, **fields: Any) -> Tokenizer:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<begin>"]
    ids = {"bos_token_id": len(tokens) - 1, "merges": []}
    return made("llama", model="gpt2", pre=pre, tokens=tokens, **ids, **fields)


def pieces(name: str = "") -> Tokenizer:
    scores = [0.0] * len(PIECES)
    given = {"tokens": PIECES, "token_type": KINDS, "scores": scores, "unknown_token_id": 0}
    return made("gemma3", name, model="llama", bos_token_id=1, **given)


@pytest.mark.parametrize("pre", THEIRS)
def test_texts_are_split_as_transformers_splits_them(pre: str):
    ours = byte_level(pre).pre_tokenizer
    assert ours is not None
    for text in TEXTS:
        assert ours.pre_tokenize_str(text) == THEIRS[pre].pre_tokenize_str(text)


@pytest.mark.parametrize(
    ("pre", "begins"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("dbrx", False)]
)
def test_an_absent_flag_of_the_first_token_means_what_llama_cpp_takes_it_for(
    pre: str, begins: bool
):
    assert (byte_level(pre).encode("a").tokens[0] == "<begin>") == begins
    assert byte_level(pre, add_bos_token=False).encode("a").tokens == ["a"]
    assert byte_level(pre, add_bos_token=True).encode("a").tokens == ["<begin>", "a"]


def test_runs_of_spaces_are_pieces_of_the_vocabulary():
    """A file of Gemma spells them as spaces. Added to the vocabulary they would have new ids."""
    tokenizer = pieces()
    assert tokenizer.get_vocab_size() == len(PIECES)
    assert tokenizer.encode("  a", add_special_tokens=False).ids == [4, 6]


@pytest.mark.parametrize(("name", "kept"), [("Phi-3 Mini", False), ("Gemma", True)])
def test_spaces_after_special_tokens_of_phi_3_are_dropped(name: str, kept: bool):
    found = pieces(name).encode("<|user|> a<s> a", add_special_tokens=False).ids
    wanted = ["<|user|>", "\u2581a" if kept else "a", "<s>", "\u2581a"]
    assert found == [PIECES.index(token) for token in wanted]
