"""The token that ends a text by a tokenizer's files. JSON is read, and no tokenizer loaded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxspec.models.json.values import is_integer, read_json


def tokenizer_stop_ids(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """The id of the tokenizer's ``eos_token``. None: it has none, or none of this vocabulary.

    Fine-tunes often change it in tokenizer_config.json alone, such as to ``<|im_end|>``. What it
    says about the tokens is checked where the tokenizer is loaded. Raises ValueError for a file
    that is no JSON.
    """
    text = _eos_token(directory)
    if text is None:
        return ()
    found = next((id_ for id_ in _ids(directory, text) if is_integer(id_)), -1)
    return (found,) if 0 <= found < vocab_size else ()


def _eos_token(directory: Path) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _object(directory / name).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text:
            return text
    return None


def _ids(directory: Path, text: str) -> Iterator[Any]:
    """What each file has as the token's id, those that are small first."""
    decoder = _part(_object(directory / "tokenizer_config.json"), "added_tokens_decoder", dict)
    yield from (int(id_) for id_, token in decoder.items() if _is(token, text) and id_.isdecimal())
    yield _object(directory / "added_tokens.json").get(text)
    tokenizer = _object(directory / "tokenizer.json")
    added = _part(tokenizer, "added_tokens", list)
    yield from (token.get("id") for token in added if _is(token, text))
    vocab = _part(tokenizer, "model", dict).get("vocab")
    if isinstance(vocab, dict):
        yield vocab.get(text)
    elif isinstance(vocab, list):  # of a Unigram model: tokens and their scores
        yield from (i for i, token in enumerate(vocab) if token and token[0] == text)
    yield _object(directory / "vocab.json").get(text)


def _is(token: Any, text: str) -> bool:
    return isinstance(token, dict) and token.get("content") == text


def _part[T](content: dict[str, Any], name: str, kind: type[T]) -> T:
    """Its value, empty unless it is of this kind."""
    value = content.get(name)
    return value if isinstance(value, kind) else kind()


def _object(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
