"""From descriptions of outputs to matchers of requests."""

import collections
import importlib
import json
import threading
from collections.abc import Iterable
from typing import Any

from jaxspec.structured.matcher import Matcher, one_line
from jaxspec.structured.spec import StructuredOutput


class GrammarCompiler:
    """Compiles grammars for one model. Threads may share it.

    The compiled grammars are kept, the least recently used is dropped first. Requests of one
    grammar share what llguidance's lexer has learned, so that later ones find it warm.
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        stop_token_ids: Iterable[int],
        *,
        max_grammars: int = 64,
    ):
        """
        Args:
          tokenizer_json: the text of the model's tokenizer.json (see tokenizer.tokenizer_json).
          vocab_size: of the target's logits; tokens that the tokenizer does not have are never
            allowed.
          stop_token_ids: tokens that may end an output. The device must stop rows at each of them.
          max_grammars: most compiled grammars to keep.

        Raises ValueError if llguidance is not installed, or does not read the tokenizer, and for
        values out of range.
        """
        stops = sorted(set(stop_token_ids))
        if not stops:
            raise ValueError("structured output needs a model with a stop token, to end the output")
        if max_grammars < 1:
            raise ValueError(f"max_grammars must be at least 1, got {max_grammars}")
        if not tokenizer_json.lstrip().startswith("{"):  # llguidance would take it as a file name
            raise ValueError("tokenizer_json must be the text of a tokenizer.json, a JSON object")
        self._library = _import_llguidance()
        try:
            self._tokenizer = self._library.LLTokenizer(
                tokenizer_json, n_vocab=vocab_size, eos_token=stops
            )
        except ValueError as error:
            raise ValueError(f"structured output: {one_line(str(error))}") from error
        self.vocab_size = vocab_size
        self.stop_token_ids = tuple(stops)
        self._max_grammars = max_grammars
        self._compiled: collections.OrderedDict[StructuredOutput, Any] = collections.OrderedDict()
        self._lock = threading.Lock()  # guards _compiled

    @property
    def num_words(self) -> int:
        """W, words of a mask."""
        return -(-self.vocab_size // 32)

    def matcher(self, spec: StructuredOutput) -> Matcher:
        """The matcher of a new request.

        Raises ValueError, in one line, for a grammar that does not compile; it names the keyword of
        a JSON schema that is not supported.
        """
        with self._lock:
            compiled = self._compiled.get(spec)
        if compiled is None:
            compiled = self._compile(spec)
        with self._lock:
            self._compiled[spec] = compiled
            self._compiled.move_to_end(spec)
            if len(self._compiled) > self._max_grammars:
                self._compiled.popitem(last=False)
        return Matcher(compiled.deep_copy(), self.num_words, frozenset(self.stop_token_ids))

    def _compile(self, spec: StructuredOutput) -> Any:
        limits = self._library.LLParserLimits(verbose_errors=False)
        try:
            grammar = self._grammar(spec)
            compiled = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        except ValueError as error:
            raise ValueError(f"{spec.kind}: {one_line(str(error))}") from error
        if compiled.is_error():
            raise ValueError(f"{spec.kind}: {one_line(compiled.get_error())}")
        return compiled

    def _grammar(self, spec: StructuredOutput) -> str:
        """The description in llguidance's own terms."""
        make = self._library.LLMatcher
        match spec.kind:
            case "json_schema" | "json_object":
                schema = spec.json_schema or '{"type": "object"}'
                options = {} if spec.whitespace else {"whitespace_flexible": False}
                return make.grammar_from_json_schema(schema, overrides=options)
            case "regex":
                return make.grammar_from_regex(spec.regex)
            case "choice":
                return _choice_grammar(spec.choice or ())
            case _:
                return make.grammar_from_lark(spec.grammar)


def _choice_grammar(choices: tuple[str, ...]) -> str:
    """A Lark grammar; its strings are written as JSON's, but DEL must be escaped too."""
    strings = [json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f") for text in choices]
    return f"start: {' | '.join(strings)}"


def _import_llguidance() -> Any:
    """The library, imported when it is needed: it is an optional dependency."""
    try:
        return importlib.import_module("llguidance")
    except ModuleNotFoundError as error:
        raise ValueError(
            "structured output needs llguidance: pip install 'jaxspec[structured]'"
        ) from error
