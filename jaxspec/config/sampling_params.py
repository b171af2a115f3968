"""Sampling parameters of requests."""

import dataclasses
import math
import reprlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeGuard

import numpy as np

from jaxspec.config.checks import is_integer, is_number
from jaxspec.config.reasoning import ReasoningBudget
from jaxspec.config.seeds import one_seed
from jaxspec.config.structured_output import StructuredOutput

LARGEST_NUMBER = 3e38  # just below float32's largest number
MOST_LOGPROBS = 20  # alternatives, as in other servers
# Of a request; the device keeps as many of each row.
MOST_BAD_SEQUENCES = 128
LONGEST_BAD_SEQUENCE = 16  # tokens


class ParameterError(ValueError):
    """A field of SamplingParams that cannot be; ``name`` is the field's."""

    def __init__(self, name: str, problem: str):
        super().__init__(f"{name} {problem}")
        self.name = name


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request samples. Immutable and hashable: lists and mappings are kept as tuples.

    Logits go through, in this order: logit_bias, allowed and bad tokens, bad sequences, min_tokens,
    repetition, frequency and presence penalty, reasoning_budget, temperature, top_k, top_p, min_p.

    Attributes:
      temperature: 0 always takes the likeliest token.
      top_k, top_p, min_p: keep the k likeliest tokens (0: all), the smallest set of mass top_p,
        those at least min_p times as likely as the likeliest; applied in this order.
      seed: in float32 and under the matching rule, equal seeds and prompts give equal texts, in any
        batch and with any drafter. None: the engine gives each request a seed of its own. Further
        samples of a prompt have the seeds after it. It may also be an integer array without
        dimensions, of NumPy or jax, or a typed key of ``jax.random.key``, which stands for the
        seed that make_sampling draws from it; it is kept as an int.
      max_tokens: most tokens to generate.
      min_tokens: tokens to generate before a stop token may be sampled.
      stop_token_ids: tokens that end the text; None takes the model's own.
      further_stop_token_ids: tokens that end the text like the model's own and beside them, unless
        stop_token_ids replaces these. Chats add the token that ends a turn.
      ignore_eos: no token ends the text but those of stop_token_ids.
      stop: strings that end the text, if they are complete after min_tokens; not part of it.
      repetition_penalty: divides positive logits of tokens that occur in the prompt or the text,
        and multiplies negative ones; 1 changes nothing.
      presence_penalty, frequency_penalty: subtracted from the logits of tokens that occur in the
        text, once, or as many times as they do.
      logit_bias: token ids and what is added to their logits.
      allowed_token_ids: the only tokens that may be sampled; None: all.
      bad_token_ids: tokens that are never sampled.
      bad_sequences: sequences of tokens that never occur in the text: after all of its tokens but
        the last, the last is not sampled. The prompt's tokens do not count.
      logprobs: give the log-probability of every token under the model's raw logits, and this
        number of likeliest tokens beside it. None: do not.
      prompt_logprobs: the same for the tokens of the prompt.
      policy_logprobs: give the log-probability of every token as it was sampled: after temperature,
        top_k, top_p and min_p; 0 at temperature 0. Not with what else changes logits.
      n: texts to return.
      best_of: texts to generate, of which the n of the highest cumulative log-probability are
        returned; None: n.
      reasoning_budget: most tokens of reasoning, after which its end marker is generated. None: no
        limit.
      structured: what the text must look like. Stop tokens of the model then always end it.
      trees: keep the draft tree of every round; the engine must have been made with trees=True.
      plain: draft nothing while all requests that run are plain; beside others it is drafted for
        like them. In float32 and under the matching rule the text is the same.
      priority: smaller is served earlier.
      cache_salt: requests share cached pages only with those of the same salt.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] | None = None
    further_stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_token_ids: tuple[int, ...] = ()
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    policy_logprobs: bool = False
    n: int = 1
    best_of: int | None = None
    reasoning_budget: ReasoningBudget | None = None
    structured: StructuredOutput | None = None
    trees: bool = False
    plain: bool = False
    priority: int = 0
    cache_salt: str | None = None

    def __post_init__(self):
        try:
            object.__setattr__(self, "seed", one_seed(self.seed))
        except ValueError as error:
            raise ParameterError("seed", str(error)) from error
        for name in _RULES:
            check_parameter(name, getattr(self, name))
        for name, freeze in _FROZEN.items():
            object.__setattr__(self, name, freeze(getattr(self, name)))
        self._check_together()

    def _check_together(self) -> None:
        """Raise ParameterError for values that contradict one another."""
        if self.min_tokens > self.max_tokens:
            raise ParameterError(
                "min_tokens",
                f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
            )
        if self.best_of is not None and self.best_of < self.n:
            raise ParameterError("best_of", f"must be at least n ({self.n}), got {self.best_of}")
        if self.num_samples > 1 and self.temperature == 0:
            name = "n" if self.best_of is None else "best_of"
            raise ParameterError(
                name,
                f"must be 1 at temperature 0, where all texts are equal, got {self.num_samples}",
            )
        if self.structured is not None and self.ignore_eos:
            problem = "cannot be with structured: a stop token ends the output"
            raise ParameterError("ignore_eos", problem)
        if self.structured is not None and self.min_tokens:
            problem = "cannot be with structured, whose output may have to end"
            raise ParameterError("min_tokens", problem)
        allowed = set(self.allowed_token_ids or ())
        if allowed and allowed <= set(self.bad_token_ids):
            problem = "has all of allowed_token_ids: allow another token"
            raise ParameterError("bad_token_ids", problem)
        if allowed and self.min_tokens and allowed <= set(self.stop_token_ids or ()):
            problem = "needs a token in allowed_token_ids that is not in stop_token_ids"
            raise ParameterError("min_tokens", problem)

        if self.policy_logprobs and (found := self._changes_of_logits):
            problem = f"cannot be with {found}, which changes logits otherwise than a policy"
            raise ParameterError("policy_logprobs", problem)

    @property
    def _changes_of_logits(self) -> str | None:
        """The first parameter that changes logits, but for temperature and truncation."""
        names = (
            *("logit_bias", "allowed_token_ids", "bad_token_ids", "bad_sequences", "min_tokens"),
            *("repetition_penalty", "frequency_penalty", "presence_penalty"),
            *("reasoning_budget", "structured"),
        )
        fields = type(self).__dataclass_fields__
        return next((name for name in names if getattr(self, name) != fields[name].default), None)

    @property
    def num_samples(self) -> int:
        """Texts to generate."""
        return self.n if self.best_of is None else self.best_of

    def samples(self, seed: int) -> list["SamplingParams"]:
        """One for each text to generate, with seeds counted from its own, or else from ``seed``."""
        if self.num_samples == 1:
            return [dataclasses.replace(self, n=1, best_of=None)]
        chooses = self.num_samples > self.n
        logprobs = 0 if chooses and self.logprobs is None else self.logprobs
        sample = dataclasses.replace(self, n=1, best_of=None, logprobs=logprobs)
        return with_distinct_seeds(
            sample if sample.seed is not None else dataclasses.replace(sample, seed=seed),
            self.num_samples,
        )

    @property
    def has_bias(self) -> bool:
        """Whether some tokens' logits are changed whatever comes before."""
        return bool(self.logit_bias or self.bad_token_ids or self.allowed_token_ids)

    @property
    def restricts_tokens(self) -> bool:
        """Whether some tokens are not allowed: it may be that none is left."""
        restricts = self.min_tokens > 0 or self.reasoning_budget is not None
        restricts = restricts or bool(self.bad_sequences)
        return self.has_bias or restricts or self.structured is not None

    @property
    def needs_controls(self) -> bool:
        """Whether the request runs in programs that apply controls, and there alone."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        is_free = self.reasoning_budget is None and self.min_tokens == 0
        is_free = is_free and not self.bad_sequences
        return self.has_bias or not is_free or penalties != (1, 0, 0)

    def stops(self, model_stops: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens that end the text; ``model_stops`` are the model's own."""
        stops = tuple(dict.fromkeys((*model_stops, *self.further_stop_token_ids)))
        if self.stop_token_ids is not None:
            further = () if self.structured is None else set(stops) - set(self.stop_token_ids)
            return (*self.stop_token_ids, *sorted(further))
        return () if self.ignore_eos else stops

    def ending_at(self, token_ids: tuple[int, ...]) -> "SamplingParams":
        """The same with further stop tokens."""
        further = (*self.further_stop_token_ids, *token_ids)
        return dataclasses.replace(self, further_stop_token_ids=tuple(dict.fromkeys(further)))

    def dense_bias(self, vocab_size: int) -> np.ndarray:
        """What is added to the logits of each token: float32 [V], -inf for those not allowed."""
        bias = np.zeros(vocab_size, np.float32)
        for token, value in dict(self.logit_bias).items():
            bias[token] = value
        bias[list(self.bad_token_ids)] = -np.inf
        if self.allowed_token_ids is not None:
            forbidden = np.ones(vocab_size, bool)
            forbidden[list(self.allowed_token_ids)] = False
            bias[forbidden] = -np.inf
        return bias

    def bad_sequence_table(self) -> np.ndarray:
        """``bad_sequences`` as the device has them: int32 [MOST_BAD_SEQUENCES,
        LONGEST_BAD_SEQUENCE], padded with -1 in front, and at the end with sequences of -1."""
        table = np.full((MOST_BAD_SEQUENCES, LONGEST_BAD_SEQUENCE), -1, np.int32)
        for row, sequence in zip(table, self.bad_sequences, strict=False):
            row[-len(sequence) :] = sequence
        return table


def check_parameter(name: str, value: Any) -> None:
    """Raise ParameterError for what a field of SamplingParams can never be."""
    holds, rule = _RULES[name]
    if not holds(value):
        shown = " ".join(reprlib.repr(value).split())  # of arrays: on one line
        raise ParameterError(name, f"must be {rule}, got {shown}")


def _is_within(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: is_number(value) and low <= value <= high  # NaN is in no range


def _is_integer_within(low: int, high: float) -> Callable[[Any], bool]:
    return lambda value: is_integer(value) and low <= value <= high


def _or_none(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


def _is_list(value: object) -> TypeGuard[tuple | list]:
    return isinstance(value, (tuple, list))


def _is_token_ids(value: object) -> bool:
    return _is_list(value) and all(map(is_integer, value))


def _is_bad_sequences(value: object) -> bool:
    return (
        _is_list(value)
        and len(value) <= MOST_BAD_SEQUENCES
        and all(_is_token_ids(ids) and 2 <= len(ids) <= LONGEST_BAD_SEQUENCE for ids in value)
    )


def _is_stop(value: object) -> bool:
    strings = [value] if isinstance(value, str) else value
    return _is_list(strings) and all(isinstance(s, str) and s for s in strings)


def _is_bias(value: object) -> bool:
    """Whether it is a mapping from token ids to biases, or the pairs that are kept of one."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    is_bias = _is_within(-100, 100)
    return _is_list(pairs) and all(
        _is_list(pair) and len(pair) == 2 and is_integer(pair[0]) and is_bias(pair[1])
        for pair in pairs
    )


_FLAG = (lambda value: isinstance(value, bool), "True or False")
_COUNT = (_is_integer_within(1, math.inf), "an integer, at least 1")
_PENALTY = (_is_within(-2, 2), "a number in [-2, 2]")
_TOKEN_IDS = (_is_token_ids, "a tuple of token ids")
_ALTERNATIVES = (
    _or_none(_is_integer_within(0, MOST_LOGPROBS)),
    f"an integer in [0, {MOST_LOGPROBS}], or None",
)

# What each parameter must be.
_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "temperature": (_is_within(0, LARGEST_NUMBER), "a finite number, at least 0"),
        "top_k": (
            _is_integer_within(0, 2**31 - 1),
            "an integer, at least 0 (0 keeps all tokens)",
        ),
        "top_p": (lambda value: _is_within(0, 1)(value) and value > 0, "a number in (0, 1]"),
        "min_p": (_is_within(0, 1), "a number in [0, 1]"),
        "seed": (_or_none(_is_integer_within(0, 2**32 - 1)), "an integer in [0, 2**32), or None"),
        "max_tokens": _COUNT,
        "min_tokens": (_is_integer_within(0, math.inf), "an integer, at least 0"),
        "stop_token_ids": (_or_none(_is_token_ids), "a tuple of token ids, or None"),
        "further_stop_token_ids": _TOKEN_IDS,
        "ignore_eos": _FLAG,
        "policy_logprobs": _FLAG,
        "trees": _FLAG,
        "plain": _FLAG,
        "stop": (_is_stop, "a string or a tuple of strings, none of them empty"),
        "repetition_penalty": (
            _is_within(0.01, 100),
            "a number in [0.01, 100] (1 changes nothing)",
        ),
        "presence_penalty": _PENALTY,
        "frequency_penalty": _PENALTY,
        "logit_bias": (_is_bias, "a mapping from token ids to numbers in [-100, 100]"),
        "allowed_token_ids": (
            _or_none(lambda value: _is_token_ids(value) and len(value) > 0),
            "a tuple of at least one token id, or None",
        ),
        "bad_token_ids": _TOKEN_IDS,
        "bad_sequences": (
            _is_bad_sequences,
            f"a tuple of at most {MOST_BAD_SEQUENCES} tuples of 2 to {LONGEST_BAD_SEQUENCE} token "
            "ids",
        ),
        "logprobs": _ALTERNATIVES,
        "prompt_logprobs": _ALTERNATIVES,
        "n": _COUNT,
        "best_of": (_or_none(_COUNT[0]), "an integer, at least 1, or None"),
        "reasoning_budget": (
            _or_none(lambda value: isinstance(value, ReasoningBudget)),
            "a ReasoningBudget, or None",
        ),
        "structured": (
            _or_none(lambda value: isinstance(value, StructuredOutput)),
            "a structured.StructuredOutput, or None",
        ),
        "priority": (is_integer, "an integer"),
        "cache_salt": (
            _or_none(lambda value: isinstance(value, str) and value != ""),
            "a string that is not empty, or None",
        ),
    }
)

# How lists and mappings are kept.
_FROZEN: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "stop_token_ids": lambda ids: None if ids is None else tuple(ids),
        "further_stop_token_ids": tuple,
        "allowed_token_ids": lambda ids: None if ids is None else tuple(ids),
        "bad_token_ids": tuple,
        "bad_sequences": lambda sequences: tuple(map(tuple, sequences)),
        "stop": lambda stop: (stop,) if isinstance(stop, str) else tuple(stop),
        "logit_bias": lambda bias: tuple(sorted(dict(bias).items())),
    }
)


def with_distinct_seeds(sampling: SamplingParams, count: int) -> list[SamplingParams]:
    """``count`` copies of ``sampling`` with seeds ``sampling.seed + i``; without a seed, ``i``."""
    first = sampling.seed or 0
    return [dataclasses.replace(sampling, seed=(first + index) % 2**32) for index in range(count)]
