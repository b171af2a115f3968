"""Matchers of the built-in model, and random JSON schemas with a check of their own."""

import functools
import random
import re
from typing import Any

import numpy as np

from jaxspec import BUILT_IN_MODEL
from jaxspec.engine.structured import GrammarCompiler, GrammarError, Matcher
from jaxspec.llm.tokenizer import load_tokenizer, tokenizer_json

VOCAB, END = 4096, 0  # of the built-in model


@functools.cache
def tokenizer() -> Any:
    return load_tokenizer(BUILT_IN_MODEL)


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer_json(tokenizer()), VOCAB, [END])


def legal(matcher: Matcher) -> list[int]:
    """The tokens that may come next."""
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def takes(matcher: Matcher, text: str) -> bool:
    """Whether the built-in model's tokens of a text, and its end, are a whole output."""
    try:
        matcher.copy().advance([*tokenizer()(text)["input_ids"], END])
    except GrammarError:
        return False
    return True


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose outputs are all short, of the keywords that ``conforms`` knows."""
    kinds = ["string", "integer", "boolean", "null", "enum", "const", "pattern"]
    kind = rng.choice(kinds + ["object", "object", "array", "anyOf"] * bool(depth))
    match kind:
        case "string":
            least = rng.randrange(3)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(1, 9)}
        case "pattern":
            patterns = ["^[a-z]{2,6}$", "^[0-9]{3}-[0-9]{4}$", "^(red|green|blue)$", "^v[0-9]$"]
            return {"type": "string", "pattern": rng.choice(patterns)}
        case "integer":
            least = rng.randrange(-200, 200)
            return {"type": "integer", "minimum": least, "maximum": least + rng.randrange(500)}
        case "enum":
            values = ["left", "right", 'say "hi"', 7, -1.5, True, None, "é"]
            return {"enum": rng.sample(values, rng.randrange(1, 5))}
        case "const":
            return {"const": rng.choice(["x y", 12, False, "a\\b"])}
        case "object":
            names = rng.sample(["id", "name", "tags", "is_on", "größe", "a b"], rng.randrange(1, 5))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth - 1) for name in names},
                "required": [name for name in names if rng.random() < 0.6],
                "additionalProperties": False,
            }
        case "array":
            least, items = rng.randrange(3), random_schema(rng, depth - 1)
            most = least + rng.randrange(1, 3)
            return {"type": "array", "items": items, "minItems": least, "maxItems": most}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}
        case _:
            return {"type": kind}


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a parsed JSON value is what a random_schema describes."""
    match schema:
        case {"anyOf": options}:
            return any(conforms(value, option) for option in options)
        case {"enum": values}:
            return any(_equal(value, one) for one in values)
        case {"const": one}:
            return _equal(value, one)
        case {"type": "string", "pattern": pattern}:
            return isinstance(value, str) and re.search(pattern, value) is not None
        case {"type": "string", "minLength": least, "maxLength": most}:
            return isinstance(value, str) and least <= len(value) <= most
        case {"type": "integer", "minimum": least, "maximum": most}:
            return type(value) is int and least <= value <= most
        case {"type": "boolean"}:
            return isinstance(value, bool)
        case {"type": "null"}:
            return value is None
        case {"type": "array", "items": items, "minItems": least, "maxItems": most}:
            sized = isinstance(value, list) and least <= len(value) <= most
            return sized and all(conforms(item, items) for item in value)
        case {"type": "object", "properties": properties, "required": required}:
            known = isinstance(value, dict) and set(required) <= set(value) <= set(properties)
            return known and all(conforms(value[name], properties[name]) for name in value)
    raise ValueError(f"no check for {schema}")


def _equal(value: Any, wanted: Any) -> bool:
    return type(value) is type(wanted) and value == wanted
