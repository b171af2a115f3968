"""What a line of a file of prompts asks for."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.config.reasoning import ReasoningBudget
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.llm.tokenizer.prompts import Conversation, Prompt

PROMPTS = ("prompt", "messages", "prompt_token_ids")
IDS = ("id", "custom_id")
SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams)) - {"trees"}
SEEDS = 2**32


@dataclasses.dataclass(frozen=True)
class BatchRequest:
    """One of ``prompt`` and ``messages`` is given, the other is None."""

    prompt: Prompt | None
    messages: Conversation | None
    sampling: SamplingParams


def line_id(line: Mapping[str, Any]) -> str | int | None:
    """What a line calls itself. Raises ValueError for what is no name, and for two."""
    given = [name for name in IDS if line.get(name) is not None]
    if len(given) > 1:
        raise ValueError("give id or custom_id, not both")
    if not given:
        return None
    value = line[given[0]]
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError(f"{given[0]} must be text or an integer, got {value!r:.80}")
    return value


def read_request(index: int, line: Mapping[str, Any], defaults: SamplingParams) -> BatchRequest:
    """The request of a line.

    A line without a seed gets one of its own, which depends on its index and the seed of
    ``defaults`` alone: equal prompts get different texts, and each the same one in every run.

    Raises ValueError for fields that are missing, unknown or wrong.
    """
    given = [name for name in PROMPTS if name in line]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise ValueError(f"a line needs exactly one of {', '.join(PROMPTS)}; this has {found}")
    unknown = sorted(line.keys() - {*PROMPTS, *IDS, *SAMPLING})
    if unknown:
        raise ValueError(f"unknown field {unknown[0]}: fields are those of SamplingParams")
    _check_prompt(given[0], line[given[0]])
    sampling = _sampling(index, line, defaults)
    prompt: Prompt | None = line.get("prompt", line.get("prompt_token_ids"))
    return BatchRequest(prompt, line.get("messages"), sampling)


def _check_prompt(name: str, prompt: Any) -> None:
    kind, text = {
        "prompt": (str, "text"),
        "messages": (list, "a list of messages"),
        "prompt_token_ids": (list, "a list of token ids"),
    }[name]
    if not isinstance(prompt, kind):
        raise ValueError(f"{name} must be {text}, got {prompt!r:.80}")


def _sampling(index: int, line: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    values = {name: value for name, value in line.items() if name in SAMPLING}
    if isinstance(values.get("logit_bias"), dict):
        values["logit_bias"] = _bias(values["logit_bias"])
    if values.get("structured") is not None:
        values["structured"] = _made(StructuredOutput, "structured", values["structured"])
    if values.get("reasoning_budget") is not None:
        given = values["reasoning_budget"]
        values["reasoning_budget"] = _made(ReasoningBudget, "reasoning_budget", given)
    sampling = dataclasses.replace(defaults, **values)
    if "seed" in values:
        return sampling
    # Samples of one prompt have the seeds after its own.
    seed = (defaults.seed or 0) + index * sampling.num_samples
    return dataclasses.replace(sampling, seed=seed % SEEDS)


def _bias(given: dict[str, Any]) -> dict[int, Any]:
    """The names of JSON's fields are texts."""
    try:
        return {int(token): value for token, value in given.items()}
    except ValueError:
        raise ValueError("logit_bias must be an object whose names are token ids") from None


def _made[T: StructuredOutput | ReasoningBudget](kind: type[T], name: str, given: Any) -> T:
    """The object of these fields. Raises ValueError for others, and if one is missing."""
    fields = dataclasses.fields(kind)
    names = {field.name for field in fields}
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    if not isinstance(given, dict) or not given.keys() <= names:
        raise ValueError(f"{name} must be an object with some of {', '.join(sorted(names))}")
    if missing := sorted(needed - given.keys()):
        raise ValueError(f"{name} needs {', '.join(missing)}")
    return kind(**given)
