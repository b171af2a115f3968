"""Files of SentencePiece as a tokenizer.json, of what llguidance reads: words, kinds, decoder."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONTROL, USER_DEFINED = 3, 4  # kinds of pieces


def tokenizer_json(path: Path) -> str:
    """Without merges: it decodes as the file says, and does not encode as it does."""
    pieces = [dict(_fields(piece)) for field, piece in _fields(path.read_bytes()) if field == 1]
    words = [piece[1].decode() for piece in pieces]
    kinds = [piece.get(3, 1) for piece in pieces]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": number, "content": word, "special": kind == CONTROL, **flags}
        for number, (word, kind) in enumerate(zip(words, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    space = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    decoders: list[dict[str, Any]] = [space, {"type": "ByteFallback"}, {"type": "Fuse"}]
    vocab = {word: number for number, word in enumerate(words)}
    model = {"type": "BPE", "byte_fallback": True, "vocab": vocab, "merges": []}
    decoder = {"type": "Sequence", "decoders": decoders}
    return json.dumps({"added_tokens": added, "decoder": decoder, "model": model})


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of the fields of a protobuf message."""
    place = 0

    def number() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < len(message):
        field, wire = divmod(number(), 8)
        if wire == 0:
            yield field, number()
            continue
        size = number() if wire == 2 else {1: 8, 5: 4}[wire]
        place += size
        yield field, message[place - size : place]
