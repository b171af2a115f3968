"""From descriptions of outputs to matchers of requests."""

import collections
import dataclasses
import importlib
import json
import threading
import time
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.structured.added_tokens import Markers, lark_string, read_vocabulary
from jaxspec.engine.structured.json_schema import guided_text, read_schema
from jaxspec.engine.structured.lark import BLANK_LINE, FORCING, NO_FORCING, after_reasoning
from jaxspec.engine.structured.matcher import GrammarError, Matcher, one_line

# Most that llguidance may do, in its own units. With these numbers no description that was tried
# took more than 0.3 s of a CPU to compile or to refuse, and no later mask more than 10 ms; with
# llguidance's own a regular expression of 17 characters took 1.6 s, and a grammar 2 s.
LIMITS = MappingProxyType(
    {
        "initial_lexer_fuel": 200_000,
        "step_lexer_fuel": 50_000,
        "step_max_items": 5_000,
        "max_lexer_states": 50_000,
        "max_grammar_size": 20_000,
    }
)
MOST_TRIED = 64  # tokens
MOST_GRAMMARS = 64  # that are kept, compiled
MOST_SECONDS = 0.5  # of CPU time, for what the limits do not foresee


class GrammarCompiler:
    """Compiles grammars for one model. Threads may share it.

    The compiled grammars are kept, the least recently used is dropped first, and so is the error of
    one that does not compile. Requests of one grammar share what llguidance's lexer has learned, so
    that later ones find it warm.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, stop_token_ids: Iterable[int]):
        """
        Args:
          tokenizer_json: the text of the model's tokenizer.json (see tokenizer.tokenizer_json).
          vocab_size: of the target's logits; tokens that the tokenizer does not have are never
            allowed.
          stop_token_ids: tokens that may end an output. The device must stop rows at each of them.

        Raises ValueError if llguidance is not installed, or does not read the tokenizer, and
        without a stop token.
        """
        stops = sorted(set(stop_token_ids))
        if not stops:
            raise ValueError("structured output needs a model with a stop token, to end the output")
        if not tokenizer_json.lstrip().startswith("{"):  # llguidance would take it as a file name
            raise ValueError("tokenizer_json must be the text of a tokenizer.json, a JSON object")
        self._library = _import_llguidance()
        try:
            vocabulary = read_vocabulary(tokenizer_json, stops)
            self._tokenizer = self._library.LLTokenizer(
                vocabulary.tokenizer_json, n_vocab=vocab_size, eos_token=stops
            )
        except ValueError as error:
            raise ValueError(f"structured output: {one_line(str(error))}") from error
        is_special = self._tokenizer.is_special_token
        special = {text: number for text, number in vocabulary.added.items() if is_special(number)}
        self.markers = Markers(vocabulary.plain, special)
        self.vocab_size = vocab_size
        self.stop_token_ids = tuple(stops)
        self._compiled: collections.OrderedDict[StructuredOutput, Any] = collections.OrderedDict()
        self._lock = threading.Lock()  # guards _compiled

    @property
    def num_words(self) -> int:
        """W, words of a mask."""
        return -(-self.vocab_size // 32)

    def matcher(self, spec: StructuredOutput) -> Matcher:
        """The matcher of a new request.

        Raises ValueError, in one line, for a grammar that does not compile, or is too large; it
        names the keyword of a JSON schema that is not supported.
        """
        spec = _of_grammar(spec)
        with self._lock:
            compiled = self._compiled.get(spec)
        if compiled is None:
            compiled = self._compile_or_refuse(spec)
        with self._lock:
            self._compiled[spec] = compiled
            self._compiled.move_to_end(spec)
            if len(self._compiled) > MOST_GRAMMARS:
                self._compiled.popitem(last=False)
        if isinstance(compiled, ValueError):
            raise ValueError(str(compiled))
        return self._new(compiled)

    def is_known(self, spec: StructuredOutput) -> bool:
        """Whether ``matcher`` has nothing to compile for this one."""
        with self._lock:
            return _of_grammar(spec) in self._compiled

    def _new(self, compiled: Any) -> Matcher:
        return Matcher(compiled.deep_copy(), self.num_words, frozenset(self.stop_token_ids))

    def _compile_or_refuse(self, spec: StructuredOutput) -> Any:
        """An llguidance.LLMatcher, or the ValueError that says why there is none."""
        started = time.thread_time()
        try:
            compiled = self._compile(spec)
            self._try(compiled)
        except (ValueError, GrammarError) as error:
            return ValueError(f"{spec.kind}: {error}")
        if time.thread_time() - started > MOST_SECONDS:  # what ends the work itself are the LIMITS
            return ValueError(f"{spec.kind}: it takes too long to compile: make it smaller")
        return compiled

    def _compile(self, spec: StructuredOutput) -> Any:
        limits = self._library.LLParserLimits(verbose_errors=False, **LIMITS)
        grammar = self._grammar(spec)
        if spec.reasoning is not None:
            grammar = after_reasoning(grammar, spec.reasoning, self.markers)
        compiled = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if compiled.is_error():
            raise ValueError(one_line(compiled.get_error()))
        return compiled

    def _try(self, compiled: Any) -> None:
        """The first mask takes the longest, and tokens show limits that masks do not.

        Goes on while only one token may follow, and one further. Raises GrammarError if the
        grammar exceeds a limit.
        """
        matcher = self._new(compiled)
        for _ in range(MOST_TRIED):
            legal = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
            legal = [int(token) for token in legal[:MOST_TRIED] if token not in self.stop_token_ids]
            if not legal:
                return
            matcher.advance(legal[:1])
            if len(legal) > 1:
                matcher.mask()
                return

    def header(self, description: str) -> str:
        """The first line of a Lark grammar in which this description stands; see Markers."""
        return NO_FORCING if self.markers.mentioned(description) else FORCING

    def _grammar(self, spec: StructuredOutput) -> str:
        """The description in llguidance's own terms. Raises ValueError."""
        match spec.kind:
            case "json_schema" | "json_object":
                return self._json(spec)
            case "regex":
                grammar = self._library.LLMatcher.grammar_from_regex(spec.regex)
                lark = json.loads(grammar)["grammars"][0]["lark_grammar"]
                return self.header(spec.regex or "") + lark
            case "choice":
                choices = spec.choice or ()
                strings = " | ".join(lark_string(text) for text in choices)
                return f"{self.header(' '.join(choices))}start: {strings}"
            case _:
                grammar = spec.grammar or ""
                is_plain = grammar.startswith("%llguidance") or not self.markers.mentioned(grammar)
                return grammar if is_plain else NO_FORCING + grammar

    def _json(self, spec: StructuredOutput) -> str:
        given = spec.json_schema
        read = read_schema(json.loads(given) if isinstance(given, str) else {"type": "object"})
        if read.problems:
            raise ValueError(read.message)
        schema, blank_line = guided_text(read.schema, spec.whitespace), spec.blank_line
        if not blank_line and not self.markers.mentioned(schema):
            return self._library.LLMatcher.grammar_from_json_schema(schema)
        return f"{self.header(schema)}start: {BLANK_LINE if blank_line else ''} %json {schema}"


def _of_grammar(spec: StructuredOutput) -> StructuredOutput:
    """What the grammar depends on."""
    return dataclasses.replace(spec, trigger=None)


def _import_llguidance() -> Any:
    """The library, imported when it is needed: it is an optional dependency."""
    try:
        return importlib.import_module("llguidance")
    except ModuleNotFoundError as error:
        raise ValueError(
            "structured output needs llguidance: pip install 'jaxspec-decoding[structured]'"
        ) from error
