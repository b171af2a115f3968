"""The words of two tokenizers compared: which tokens of a draft model a target has, too."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.models.json.values import read_json, shown

type Spelt = Mapping[bytes, int]  # tokens by what they spell
LEAST_SHARED = 0.5  # of the tokens of the smaller vocabulary
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted(set(range(256)) - set(_PRINTABLE))
# The letters that byte-level tokenizers write bytes with: those that cannot be seen have others.
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + place): byte for place, byte in enumerate(_OTHERS)
}


def vocabulary(directory: Path) -> dict[str, int] | None:
    """The words of a tokenizer.json, by name; None: there is no such file.

    Raises ValueError for a file without a vocabulary.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    model = read_json(path).get("model")
    words = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(words, list):  # of [token, score]
        return {str(entry): i for i, entry in enumerate(words)}
    if not isinstance(words, dict):
        raise ValueError(f"{path}: model.vocab must be an object or a list, got {shown(words)}")
    return words


def spelt_words(directory: Path) -> Spelt | None:
    """What each token of a tokenizer.json spells. None: there is none of bytes or of \u2581.

    Added tokens are spelt as their text, after a zero byte, which no other token begins with.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    content = read_json(path)
    kinds, words = _kinds(content.get("decoder")), _named(content)
    if not words or not kinds & {"ByteLevel", "Metaspace", "Replace"}:
        return None
    spell = _of_letters if "ByteLevel" in kinds else _of_text
    added = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    spelt = {spell(word): number for word, number in words.items() if word not in added}
    return spelt | {b"\0" + word.encode(): number for word, number in added.items()}


def _named(content: dict[str, Any]) -> dict[str, int]:
    words = content["model"].get("vocab", {})
    if isinstance(words, list):
        return {str(word): number for number, (word, _) in enumerate(words)}
    return words


def _kinds(decoder: Any) -> set[str]:
    """The types of a decoder and of its parts."""
    if not isinstance(decoder, dict):
        return set()
    return {str(decoder.get("type"))}.union(*map(_kinds, decoder.get("decoders", [])))


def _of_letters(word: str) -> bytes:
    known = [_BYTES.get(letter) for letter in word]
    return word.encode() if None in known else bytes(byte for byte in known if byte is not None)


def _of_text(word: str) -> bytes:
    if len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
        return bytes([int(word[3:5], 16)])
    return word.replace("\u2581", " ").encode()


class Shared(NamedTuple):
    """The tokens that a target and a draft model share; see VocabularyMap.

    ``share``: of the smaller vocabulary's tokens.
    """

    model_ids: np.ndarray
    shared: np.ndarray
    token_ids: np.ndarray
    share: float


def shared_tokens(target: Spelt, model: Spelt, target_size: int, model_size: int) -> Shared:
    """Compare two vocabularies; the sizes are those of embeddings, which may have more rows."""
    pairs = sorted(
        (token, model[word])
        for word, token in target.items()
        if word in model and token < target_size and model[word] < model_size
    )
    model_ids = np.zeros(target_size, np.int32)
    for word, token in target.items():
        if token < target_size:
            found = _ending(word.removeprefix(b"\0"), model) if word not in model else model[word]
            model_ids[token] = found if found < model_size else 0
    token_ids, shared = np.array(pairs, np.int32).reshape(-1, 2).T
    return Shared(model_ids, shared, token_ids, len(pairs) / max(1, min(len(target), len(model))))


def _ending(word: bytes, model: Spelt) -> int:
    """The longest token of a model that the word ends with; 0: there is none."""
    endings = (word[place:] for place in range(len(word)))
    return next((model[ending] for ending in endings if ending in model), 0)
