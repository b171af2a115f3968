"""A tokenizer for models of random weights, so that grammars can restrict what they generate."""

import itertools
import json
import string
from collections.abc import Iterator

SPACE = "Ġ"  # as byte-level tokenizers write it


def synthetic_tokenizer(vocab_size: int) -> str:
    """The text of a tokenizer.json: byte-level, of printable ASCII characters and made-up words.

    Its last token is special, and ends a text. There is no backslash and no other character of
    several bytes, so inside a JSON string any token but the quote may follow any other.

    Raises ValueError for fewer than 128 tokens.
    """
    if vocab_size < 128:
        raise ValueError(f"a vocabulary must have at least 128 tokens, got {vocab_size}")
    characters = [chr(code) for code in range(0x21, 0x7F) if chr(code) != "\\"]
    ordinary = itertools.islice(itertools.chain([SPACE], characters, _words()), vocab_size - 1)
    end = {"id": vocab_size - 1, "content": "<end>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    vocabulary = {token: index for index, token in enumerate(ordinary)}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [end | flags],
            "pre_tokenizer": byte_level | {"use_regex": True},
            "decoder": byte_level | {"use_regex": True},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        }
    )


def _words() -> Iterator[str]:
    """With and without a space before them, the shortest first."""
    for length in itertools.count(2):
        for before in ("", SPACE):
            for letters in itertools.product(string.ascii_lowercase, repeat=length):
                yield before + "".join(letters)
