"""What programs are called where people read of them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxspec.engine.programs.sizes import Kind, ReadKey, RoundsKey, VerifyKey

_KINDS: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.GREEDY: "greedy",
        Kind.SAMPLED: "sampled",
        Kind.FULL: "with penalties and log-probabilities",
        Kind.POLICY: "with log-probabilities of the policy",
        Kind.PROMPT: "with log-probabilities of the prompt",
    }
)
_SMALL: Mapping[str, str] = MappingProxyType(
    {
        "admit": "requests that begin",
        "release": "requests that end early",
        "catch_up": "the drafter's last tokens of requests",
        "copy_pages": "copies of pages",
        "remember": "texts that the drafter looks up",
        "save_row": "copies of requests to host memory",
        "restore_row": "copies of requests back from host memory",
        "take_states": "copies of recurrent states to host memory",
        "put_states": "copies of recurrent states back from host memory",
        "set_controls": "bias and penalties of requests",
    }
)


def program_name(key: Any, page_size: int) -> str:
    """A program by its key, such as ``rounds of 4 requests of up to 512 tokens, tree chain:3,
    sampled``."""
    if not isinstance(key, ReadKey | RoundsKey | VerifyKey):
        return _SMALL.get(key[0], str(key[0]))
    many = "1 request" if key.rows == 1 else f"{key.rows} requests"
    tokens = key.columns * page_size
    if isinstance(key, VerifyKey):
        kind = _KINDS[key.kind]
        return f"old texts, {key.width} tokens of {many} of up to {tokens} tokens, {kind}"
    ending = f"{_KINDS[key.kind]}{', structured' * key.masked}{', no drafter' * key.undrafted}"
    if isinstance(key, ReadKey):
        return f"prompts, {key.width} tokens of {many} of up to {tokens} tokens, {ending}"
    how = "drafting nothing" if key.shape.is_plain else f"tree {key.shape.name}"
    return f"rounds of {many} of up to {tokens} tokens, {how}, {ending}"
