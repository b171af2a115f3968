"""Structured outputs of a whole batch, and random JSON schemas with a check of their own."""

import functools
import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec import BUILT_IN_MODEL
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.decoding.sampling import Sampling
from jaxspec.decoding.state import Status
from jaxspec.engine.structured import GrammarCompiler, GrammarError, Matcher, tree_masks
from jaxspec.functional import EngineParams
from jaxspec.llm.tokenizer import load_tokenizer, tokenizer_json
from tests.helpers.constrained_rounds import generate_restricted

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


def generate_structured(
    params: EngineParams,
    prompts: list[str],
    outputs: Sequence[StructuredOutput | None],
    sampling: Sampling,
    *,
    new_tokens: int = 200,
    **options: Any,
) -> tuple[list[str | None], list[list[int]], Any]:
    """Each row's text, None if it did not end by itself; its tokens; the final state."""
    matchers = [None if output is None else compiler().matcher(output) for output in outputs]
    words = compiler().num_words

    def masks(tree: Any) -> np.ndarray:
        if tree is None:
            roots = np.zeros((len(matchers), 1), np.int32)
            return tree_masks(matchers, roots, roots - 1, roots[:, 0] + 1, words)[0][:, 0]
        found, errors = tree_masks(matchers, tree.tokens, tree.parents, tree.num_nodes, words)
        assert not errors
        return found

    def take(row: int, tokens: list[int]) -> None:
        matcher = matchers[row]
        if matcher is not None:
            matcher.advance(tokens)

    ids = [np.asarray(tokenizer()(prompt)["input_ids"], np.int32) for prompt in prompts]
    found, state = generate_restricted(
        params, ids, sampling, masks, take,
        new_tokens=new_tokens, stop_token_ids=(END,), **options,
    )  # fmt: skip
    assert (np.asarray(state.rows.status) == Status.DONE).all()
    texts = [tokenizer().decode(row[:-1]) if row[-1] == END else None for row in found]
    for matcher, text in zip(matchers, texts, strict=True):
        assert matcher is None or matcher.finished == (text is not None)
    return texts, found, state


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
