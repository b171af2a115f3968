"""Files of SentencePiece: their pieces, and as a tokenizer.json, of what llguidance reads."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

CONTROL, USER_DEFINED = 3, 4  # kinds of pieces


class Piece(NamedTuple):
    word: str
    score: float
    kind: int


def pieces(path: Path) -> list[Piece]:
    messages = (message for field, message in _fields(path.read_bytes()) if field == 1)
    return [_piece(dict(_fields(message))) for message in messages]


def _piece(fields: dict[int, Any]) -> Piece:
    [score] = struct.unpack("<f", fields.get(2, bytes(4)))
    return Piece(fields[1].decode(), score, fields.get(3, 1))


def tokenizer_json(path: Path) -> str:
    """Without merges: it decodes as the file says, and does not encode as it does."""
    found = pieces(path)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": number, "content": word, "special": kind == CONTROL, **flags}
        for number, (word, _, kind) in enumerate(found)
        if kind in (CONTROL, USER_DEFINED)
    ]
    space = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    decoders: list[dict[str, Any]] = [space, {"type": "ByteFallback"}, {"type": "Fuse"}]
    vocab = {piece.word: number for number, piece in enumerate(found)}
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
