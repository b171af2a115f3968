"""Mutated files either load, or give a ValueError of one line that names the file.

3,000 mutations of a small target and heads, of their configs, indexes and safetensors headers.
"""

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from jaxspec.checkpoints.block import holds_block_head, load_block_head, save_block_head
from jaxspec.checkpoints.checkpoint_files import scan
from jaxspec.checkpoints.eagle import head_method, load_eagle_head, save_eagle_head
from jaxspec.checkpoints.safetensors_io import load_decoder, save_decoder
from jaxspec.models.decoder import Decoder, decoder_shapes
from jaxspec.models.from_config.model import load_model_config
from tests.helpers.block_heads import KINDS as BLOCK_HEADS
from tests.helpers.block_heads import random_head
from tests.helpers.random_models import eagle3_head, tiny_config

CASES = 334  # of each kind of file
LONGEST = 4000  # message
DEEP = "deeply nested"
NASTY = (
    None, True, False, 0, -1, 1, 2, 7, 96, 1.5, -0.0, 1e-300, float("nan"), float("inf"), 2**31,
    2**63, -(2**63), 10**30, 10**400, "", "x", "a\nb", "\x00", "../x.safetensors", "/x", "\ud800",
    "llama", "qwen2", "eagle3", "F32", "BOOL", [], {}, [[]], [None], [1, "2"], [0, 10**30], [{}],
    {"a": 1}, {"rope_type": "llama3"}, {"rope_type": []}, {"dtype": "F32"}, DEEP, "long " * 2000,
    ["x"] * 5000,
)  # fmt: skip
CONFIG = tiny_config()
DTYPE = jnp.dtype("float32")


class Kind(NamedTuple):
    """A file to mutate, and what reads it."""

    file: str
    read: Callable[[Path], Any]


def read_target(directory: Path) -> Decoder:
    return load_decoder(directory / "target", load_model_config(directory / "target"), DTYPE)


def read_config(directory: Path) -> None:
    load_model_config(directory / "target")


def read_index(directory: Path) -> None:
    scan(directory / "target")


def read_head(directory: Path) -> None:
    if head_method(directory / "head") is not None:
        load_eagle_head(directory / "head", CONFIG, DTYPE)


def read_block(kind: str, directory: Path) -> None:
    if holds_block_head(directory / kind):
        load_block_head(directory / kind, CONFIG, DTYPE)


SHARD = "model-00001-of-00001.safetensors"
KINDS = {
    "a target's config": Kind("target/config.json", read_target),
    "a target's generation config": Kind("target/generation_config.json", read_config),
    "a head's config": Kind("head/config.json", read_head),
    "an index": Kind("target/model.safetensors.index.json", read_index),
    "a target's header": Kind(f"target/{SHARD}", read_target),
    "a head's header": Kind("head/model.safetensors", read_head),
    "DFlash's config": Kind("dflash/config.json", functools.partial(read_block, "dflash")),
    "DSpark's config": Kind("dspark/config.json", functools.partial(read_block, "dspark")),
    "DSpark's header": Kind("dspark/model.safetensors", functools.partial(read_block, "dspark")),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """``target``, of one shard with an index, ``head``, and block heads."""
    directory = tmp_path_factory.mktemp("checkpoints")
    shapes = decoder_shapes(CONFIG, DTYPE)
    target = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes)
    save_decoder(target, directory / "target")
    (directory / "target/model.safetensors").rename(directory / "target" / SHARD)
    header, _ = split_header((directory / "target" / SHARD).read_bytes())
    weight_map = dict.fromkeys(name for name in json.loads(header) if name != "__metadata__")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weight_map, SHARD)}
    write_json(directory / "target/model.safetensors.index.json", index)
    write_json(directory / "target/generation_config.json", {"eos_token_id": [2, 3]})
    config = json.loads((directory / "target/config.json").read_text())
    write_json(directory / "target/config.json", config | {"rope_scaling": LLAMA3})
    save_eagle_head(eagle3_head(target), directory / "head", CONFIG)
    for name in BLOCK_HEADS:
        save_block_head(random_head(CONFIG, name), directory / name, target)
    return directory


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def split_header(data: bytes) -> tuple[bytes, bytes]:
    """The header of a safetensors file, and what follows it."""
    size = int.from_bytes(data[:8], "little")
    return data[8 : 8 + size], data[8 + size :]


def mutated(data: bytes, is_header: bool, rng: random.Random) -> bytes:
    """A few changes: half of the time to what the JSON says, else to the bytes themselves."""
    if rng.random() < 0.3:
        return mutated_bytes(data, rng)
    header, rest = split_header(data) if is_header else (data, b"")
    content = json.loads(header)
    for _ in range(rng.choice((1, 1, 2, 3))):
        content = mutated_json(content, rng)
    deep = "[" * 5000 + "]" * 5000
    text = json.dumps(content).replace(json.dumps(DEEP), deep).encode()
    return (len(text).to_bytes(8, "little") if is_header else b"") + text + rest


def mutated_json(content: Any, rng: random.Random) -> Any:
    """With another value, a key less or a key more, somewhere."""
    if not isinstance(content, (dict, list)) or not content or rng.random() < 0.02:
        return rng.choice(NASTY)
    key = rng.choice(list(content) if isinstance(content, dict) else range(len(content)))
    changed = content.copy()
    if isinstance(content[key], (dict, list)) and rng.random() < 0.7:
        changed[key] = mutated_json(content[key], rng)
    elif rng.random() < 0.7:
        changed[key] = rng.choice(NASTY)
    elif rng.random() < 0.5:
        del changed[key]
    elif isinstance(changed, dict):
        changed[rng.choice(["x", "a\nb", "\x00", str(key) + "2"])] = rng.choice(NASTY)
    return changed


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(min(len(data), 2000))
    end = min(len(data), start + rng.randrange(1, 9))
    match rng.choice(["cut", "insert", "replace", "truncate"]):
        case "cut":
            return data[:start] + data[end:]
        case "insert":
            return data[:start] + rng.randbytes(end - start) + data[start:]
        case "replace":
            return data[:start] + rng.randbytes(end - start) + data[end:]
        case _:
            return data[:start]


@pytest.mark.parametrize("name", KINDS)
def test_mutated(name: str, checkpoints: Path):
    kind = KINDS[name]
    path = checkpoints / kind.file
    original, outcomes = path.read_bytes(), {"loaded": 0, "refused": 0}
    kind.read(checkpoints)  # the original loads
    try:
        for seed in range(CASES):
            changed = mutated(original, path.suffix == ".safetensors", random.Random(seed))
            path.write_bytes(changed)
            try:
                kind.read(checkpoints)
                outcomes["loaded"] += 1
            except UserWarning as warning:  # of a key that nobody reads
                outcomes["loaded"] += 1
                assert "does not read: " in str(warning) and "\n" not in str(warning)
            except ValueError as error:
                outcomes["refused"] += 1
                message = str(error)
                assert "\n" not in message and len(message) < LONGEST, (seed, message)
                assert str(path.parent) in message, (seed, message)
                message.encode()  # can be printed
            except Exception as error:
                raise AssertionError(f"seed {seed}: {changed[:500]!r}") from error
    finally:
        path.write_bytes(original)
    assert min(outcomes.values()) > 5, outcomes


def test_there_are_enough_mutations():
    assert CASES * len(KINDS) >= 2000
