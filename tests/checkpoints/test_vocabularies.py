"""Vocabularies of two tokenizers compared, token by token."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import jaxspec
from jaxspec import SpeculationConfig
from jaxspec.checkpoints.vocabularies import shared_tokens, spelt_words
from jaxspec.decoding.drafters import MappedModelDrafter
from tests.helpers.checkpoints import save_byte_tokenizer, tiny_byte_llama, tiny_llama
from tests.helpers.small_tokenizers import byte_level, sentencepiece_like


def saved(tokenizer: Tokenizer, path: Path) -> Path:
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize("word", [" the", "the", "é", "\n", " ", "你"])
def test_words_of_different_kinds_of_tokenizers_are_spelt_alike(word: str, tmp_path: Path):
    levels = byte_level(), sentencepiece_like()
    for number, tokenizer in enumerate(levels):
        spelt = spelt_words(saved(tokenizer, tmp_path / str(number)))
        assert spelt is not None
        ids = tokenizer.encode("a" + word, add_special_tokens=False).ids
        names = {token: spelling for spelling, token in spelt.items()}
        assert b"".join(names[token] for token in ids).lstrip(b" ") == f"a{word}".encode()


def test_tokens_that_one_lacks_stand_for_their_end():
    target = {b"a": 0, b"b": 1, b" ab": 2, b"\0<end>": 3, b"zz": 4, b"far": 9}
    model = {b"b": 0, b"a": 2, b"ab": 3, b"\0<end>": 4, b"c": 5, b">": 6}
    found = shared_tokens(target, model, target_size=6, model_size=5)
    assert found.model_ids.tolist() == [2, 0, 3, 4, 0, 0]
    pairs = dict(zip(found.token_ids.tolist(), found.shared.tolist(), strict=True))
    assert pairs == {0: 2, 1: 0, 3: 4}
    assert found.share == 3 / 6
    other = shared_tokens({b"\0<eos>": 0}, model, target_size=1, model_size=7)
    assert other.model_ids.tolist() == [6], "an added token stands for the end of its text"
    assert not other.share and not len(other.shared)


def permuted(directory: Path, path: Path) -> Path:
    """The same model, of tokens in the reverse order."""
    path = tiny_byte_llama(path, tie_word_embeddings=True)
    content = json.loads((directory / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = {word: len(vocab) - 1 - token for word, token in vocab.items()}
    for added in content["added_tokens"]:
        added["id"] = len(vocab) - 1 - added["id"]
    (path / "tokenizer.json").write_text(json.dumps(content))
    return path


def test_a_draft_model_of_other_ids_is_mapped(tmp_path: Path):
    target = tiny_byte_llama(tmp_path / "target")
    draft = permuted(target, tmp_path / "draft")
    chain = SpeculationConfig.chain(2)
    drafter = jaxspec.load(target, draft, speculation=chain).drafter
    assert isinstance(drafter, MappedModelDrafter)
    ids = drafter.vocabulary
    np.testing.assert_array_equal(ids.model_ids, 256 - np.arange(257))
    np.testing.assert_array_equal(ids.shared, 256 - np.asarray(ids.token_ids))
    other = tiny_llama(tmp_path / "other", vocab_size=320)
    saved(sentencepiece_like(byte_fallback=False), tmp_path / "words")
    (tmp_path / "words" / "tokenizer.json").rename(other / "tokenizer.json")
    with pytest.raises(
        ValueError, match="of their tokens: a draft model must share at least 50%, or"
    ):
        jaxspec.load(target, other, speculation=chain)
    save_byte_tokenizer(other)
    assert not isinstance(jaxspec.load(target, other, speculation=chain).drafter, type(drafter))


def test_a_draft_model_for_shorter_texts_than_the_targets_is_told(tmp_path: Path):
    target = tiny_byte_llama(tmp_path / "target", max_position_embeddings=256)
    draft = tiny_byte_llama(tmp_path / "draft", max_position_embeddings=128)
    chain = SpeculationConfig.chain(2)
    with pytest.warns(UserWarning, match="draft has 128 positions, and the target 256: in texts"):
        jaxspec.load(target, draft, speculation=chain)
    jaxspec.load(draft, target, speculation=chain)  # of longer ones it may be
