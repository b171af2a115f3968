"""Parts of responses that are made from completions."""

import functools
import time
import uuid
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from jaxspec.engine.generation import ErrorKind, TokenLogprob
from jaxspec.llm.completion import Completion, generated_tokens
from jaxspec.llm.llm import LLM
from jaxspec.llm.tokenizer.detokenizer import REPLACEMENT, Detokenizer
from jaxspec.serving.errors import ApiError, CutShort
from jaxspec.serving.protocol.completions import CompletionLogprobs
from jaxspec.serving.protocol.sampling import (
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    Speculation,
    Usage,
)

# The HTTP status and the ``code`` of errors with which requests end.
_ERRORS: Mapping[ErrorKind, tuple[int, str | None]] = MappingProxyType(
    {
        ErrorKind.NOT_FINITE: (500, None),
        ErrorKind.NO_TOKEN: (400, "no_token_allowed"),
        ErrorKind.TOO_LONG: (500, None),  # what does not fit was refused before
        ErrorKind.WRONG_PROGRAM: (500, None),
        ErrorKind.GRAMMAR_LIMIT: (400, "grammar_too_large"),
        ErrorKind.GRAMMAR_MISMATCH: (500, None),
        ErrorKind.INTERRUPTED: (500, None),
    }
)


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def now() -> int:
    return int(time.time())


def usage(completions: Sequence[Completion], samples: int) -> Usage:
    """The tokens of a request. Each prompt has ``samples`` completions in a row.

    What best_of has left out was generated, too, and counts, as OpenAI counts it.
    """
    prompts = completions[::samples]
    read = sum(len(completion.prompt_token_ids) for completion in prompts)
    cached = sum(completion.cached_tokens for completion in prompts)
    return partial_usage(read, generated_tokens(completions), cached)


def partial_usage(prompt: int, generated: int, cached: int) -> Usage:
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


def speculation(completion: Completion) -> Speculation:
    return Speculation(
        rounds=completion.num_rounds,
        drafted=completion.num_drafted,
        acceptance_length=completion.acceptance_length,
        acceptance_by_depth=completion.acceptance_by_depth,
    )


def finish_reason(completion: Completion) -> str:
    """``stop``, ``length``, or ``abort`` by who runs the server. Raises ApiError for a request that
    could not end so."""
    match completion.finish_reason:
        case "stop" | "length" | "abort":
            return completion.finish_reason
        case "timeout":
            kind, code = "timeout_error", "timeout"
            raise ApiError(504, "the request took too long", kind=kind, code=code)
        case "cancelled":
            raise CutShort
    assert completion.error is not None and completion.error_kind is not None
    # The model's own troubles are told; what went wrong in the engine stands in the log.
    interrupted = completion.error_kind is ErrorKind.INTERRUPTED
    message = "an internal error; see the server's log" if interrupted else completion.error
    status, code = _ERRORS[completion.error_kind]
    kind = "server_error" if status >= 500 else "invalid_request_error"
    raise ApiError(status, message, kind=kind, code=code)


class TokenPlaces:
    """Where the text of each token begins, in the text of a choice.

    Args:
      detokenizer: of the tokens, after what comes before them.
      offset: characters that come before them in the choice.
    """

    def __init__(self, detokenizer: Detokenizer, offset: int = 0):
        self._detokenizer, self._offset = detokenizer, offset

    def next(self, token_id: int) -> int:
        """The place of the next token; of a part of a character, where the character begins."""
        place, held = self._offset, self._detokenizer.held
        piece = self._detokenizer.push([token_id])
        self._offset += len(piece)
        # What came before, if it stays broken, is not a part of this token's character.
        return place + len(held) if piece.startswith(held) else place


class TokenTexts:
    """The text of single tokens, as they stand inside a text."""

    def __init__(self, llm: LLM):
        self._decode, self._token_bytes = llm.detokenize, llm.token_bytes
        self.of = functools.lru_cache(maxsize=100_000)(self._of)

    def _of(self, token_id: int) -> str:
        """Some decoders drop a space at the beginning: so the second of two is looked at."""
        first, both = self._decode([token_id]), self._decode([token_id, token_id])
        return both.removeprefix(first) if both.startswith(first) else first

    def bytes_of(self, token_id: int) -> list[int]:
        """UTF-8, of which a token may have a part of a character."""
        text = self.of(token_id)
        known = self._token_bytes(token_id) if REPLACEMENT in text else None
        return list(text.encode() if known is None else known)

    def logprobs(
        self, entries: Sequence[TokenLogprob | None], places: TokenPlaces
    ) -> CompletionLogprobs:
        """In the shape of `/v1/completions`; ``places`` says where each token's text begins.

        The entry of an echoed prompt's first token is None: it must be added by the caller.
        """
        known = [entry for entry in entries if entry is not None]
        return CompletionLogprobs(
            tokens=[self.of(entry.token_id) for entry in known],
            token_logprobs=[entry.logprob for entry in known],
            top_logprobs=[self._by_text(entry) for entry in known],
            text_offset=[places.next(entry.token_id) for entry in known],
        )

    def _by_text(self, entry: TokenLogprob) -> dict[str, float]:
        """The log-probabilities by text; of tokens with the same text, such as parts of characters,
        that of the sampled one or else the likeliest."""
        found = {self.of(entry.token_id): entry.logprob}
        for token, logprob in entry.top:
            found.setdefault(self.of(token), logprob)
        return found

    def prompt_logprobs(self, entries: Sequence[TokenLogprob | None]) -> PromptLogprobs:
        """In vLLM's shape: by token id, for each token of the prompt."""
        return [None if entry is None else self._by_id(entry) for entry in entries]

    def _by_id(self, entry: TokenLogprob) -> dict[str, PromptLogprob]:
        ranked: dict[int, tuple[float, int | None]] = {
            token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)
        }
        ranked.setdefault(entry.token_id, (entry.logprob, None))
        return {
            str(token): PromptLogprob(logprob=logprob, rank=rank, decoded_token=self.of(token))
            for token, (logprob, rank) in ranked.items()
        }
