"""A request under way, and what has come of it so far."""

import dataclasses
import enum
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.decoding.state import Ending
from jaxspec.engine.structured import Matcher
from jaxspec.engine.structured.phases import Phases, new_phases
from jaxspec.scheduling.sequence import Request

FinishReason = Literal["stop", "length", "abort", "cancelled", "timeout", "error"]
_REASONS: dict[Ending, FinishReason] = {Ending.STOP: "stop", Ending.LENGTH: "length"}


class ErrorKind(enum.StrEnum):
    """What went wrong with a request whose finish_reason is ``error``."""

    NOT_FINITE = "not_finite"  # the model's logits were not finite numbers
    # The same of a request that restricts its tokens: it may have left none.
    NO_TOKEN = "no_token"
    TOO_LONG = "too_long"  # it does not fit the cache
    WRONG_PROGRAM = "wrong_program"  # it ran in a program that does not serve it
    GRAMMAR_LIMIT = "grammar_limit"  # its grammar exceeds a limit
    GRAMMAR_MISMATCH = "grammar_mismatch"  # its tokens do not match its grammar
    INTERRUPTED = "interrupted"  # the engine has failed, and not the request or the model


_ERRORS = {  # by the ending of a row; any other is a mistake of the engine
    Ending.NOT_FINITE: (
        ErrorKind.NOT_FINITE,
        "the model's logits were not finite numbers, or no token was allowed: its weights are "
        "broken, its dtype is too narrow for them, or the request allows too little",
    ),
    Ending.TOO_LONG: (ErrorKind.TOO_LONG, "the prompt and its limit do not fit the cache"),
}


class TokenLogprob(NamedTuple):
    """The log-probability of a token, and of the likeliest tokens in its place, likeliest first.

    They are those of the model itself: no temperature, bias or penalty changes them.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class RoundTree:
    """One round of a request: the tree that was drafted, and what came of it.

    Attributes:
      tokens: of the N nodes. Node 0, the root, is the last token before the round.
      parents: of each node; -1 for the root. A parent comes before its children.
      probabilities: of each node's token after its parent, by the model itself: no temperature,
        bias or penalty changes them. None for the root.
      path: the accepted nodes, from the root down.
      bonus: the model's own token after the last of them.
      committed: tokens that the round added to the text: those of the path without the root, then
        the bonus, unless the text ended before.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    probabilities: tuple[float | None, ...]
    path: tuple[int, ...]
    bonus: int
    committed: int

    @property
    def committed_tokens(self) -> list[int]:
        """The tokens that the round added to the text."""
        return [*(self.tokens[node] for node in self.path[1:]), self.bonus][: self.committed]


@dataclasses.dataclass
class RequestStatistics:
    """Rounds of one request; ``accepted[d]`` counts those that accepted at least d tokens."""

    rounds: int
    drafted: int
    accepted: list[int]

    def add(self, counts: np.ndarray, accepted: np.ndarray, drafted: np.ndarray) -> None:
        """Count the rounds of a call, [C] each; those that committed nothing did not run."""
        ran = counts > 0
        self.rounds += int(ran.sum())
        self.drafted += int(drafted[ran].sum())
        exactly = np.bincount(accepted[ran], minlength=len(self.accepted))
        at_least = exactly[::-1].cumsum()[::-1].tolist()  # a loop over depths is ten times slower
        self.accepted = [sum(each) for each in zip(self.accepted, at_least, strict=True)]


@dataclasses.dataclass(frozen=True)
class Timings:
    """Times of one request: on the engine's clock, which stands still while programs compile.

    Attributes:
      arrived, first_token, finished: seconds on that clock.
      compile: seconds that programs were compiled in meanwhile.
    """

    arrived: float
    first_token: float
    finished: float
    compile: float

    @property
    def prefill(self) -> float:
        """Seconds to the first token, waiting included."""
        return self.first_token - self.arrived

    @property
    def decode(self) -> float:
        """Seconds from the first token to the last."""
        return self.finished - self.first_token


@dataclasses.dataclass
class Grammar:
    """A matcher, and how many tokens of its request it has seen.

    ``phases``: of a request some of whose text the matcher does not see.
    """

    matcher: Matcher
    taken: int = 0
    phases: Phases | None = None

    def follow(self, tokens: Sequence[int]) -> Matcher:
        """The matcher after all tokens of its request. Raises GrammarError if they do not match."""
        new = list(enumerate(tokens))[self.taken :]
        phases, self.taken = self.phases, len(tokens)
        self.matcher.advance([t for i, t in new if phases is None or not phases.is_free(i)])
        return self.matcher


def new_grammar(
    sampling: SamplingParams,
    make_matcher: Callable[[StructuredOutput], Matcher] | None,
    stops: Collection[int],
    most_stops: int,
) -> Grammar | None:
    """The grammar of a new request, whose text ends at ``stops``; for ``most_stops`` see
    new_phases. None: its output has no structure.

    Raises ValueError without ``make_matcher`` for a request that needs one.
    """
    if sampling.structured is None:
        return None
    if make_matcher is None:
        raise ValueError("structured needs an engine with make_matcher")
    matcher = make_matcher(sampling.structured)
    phases = new_phases(sampling.structured, stops, most_stops)
    return Grammar(matcher.ending_at(sampling.further_stop_token_ids), phases=phases)


@dataclasses.dataclass(eq=False)
class Generation:
    """A request that an engine generates; the engine's ``step`` extends it.

    Attributes:
      sampling: with the seed that it got, if it had none.
      token_ids: new tokens so far.
      logprobs: of the new tokens so far; None: not asked for.
      policy_logprobs: of the new tokens, as they were sampled (see SamplingParams).
      prompt_logprobs: of the prompt's tokens, as far as it is read; None for the first of them, and
        if not asked for.
      finish_reason: None until it has ended.
      trees: of its rounds so far; None: not asked for.
      grammar: where it stands in the description of a structured output.
      error: what went wrong, if its finish_reason is ``error``; ``error_kind`` is its kind.
      timings: None until it has ended.
      cached_tokens: of the prompt, whose KV it found when it got its first row.
      waited: seconds until it got that row; None: it never had one.
      preemptions: times that it lost its row to others, as far as it got one again.
      streams: whether its tokens are shown before it has ended, so that they cannot be taken back.
      version: of the weights that generate it, all of it; see Engine.use_target.
      restarts: times that it went back to its prompt as the weights changed.
      draft: an old text that was given with it; it is verified first.
      kept_tokens: of that, or of what it had before it went back, those that the target writes.
      host_drafts: whether the host drafts for it; see HostDrafter.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    statistics: RequestStatistics
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    trees: list[RoundTree] | None = None
    policy_logprobs: list[float] | None = None
    grammar: Grammar | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_kind: ErrorKind | None = None
    timings: Timings | None = None
    cached_tokens: int = 0
    waited: float | None = None
    preemptions: int = 0
    streams: bool = False
    version: int = 0
    restarts: int = 0
    draft: tuple[int, ...] = ()
    kept_tokens: int = 0
    host_drafts: bool = False

    def __post_init__(self):
        self._forget_text()

    def _forget_text(self) -> None:
        if self.sampling.logprobs is not None:
            self.logprobs = []
        if self.sampling.policy_logprobs:
            self.policy_logprobs = []
        if self.sampling.trees:
            self.trees = []
        self.forget_prompt()

    @property
    def phases(self) -> Phases | None:
        """The phases of a structured request with free text."""
        return None if self.grammar is None else self.grammar.phases

    @property
    def pauses(self) -> tuple[int, ...]:
        """The tokens at which its row stops, and goes on."""
        return () if self.phases is None else self.phases.pauses

    def fail(self, kind: ErrorKind, message: str) -> None:
        """Say what went wrong; the engine then ends it."""
        self.error_kind, self.error = kind, message

    def fail_interrupted(self, error: BaseException) -> None:
        """Say that a call was interrupted that it was part of."""
        self.fail(ErrorKind.INTERRUPTED, f"interrupted: {type(error).__name__}: {error}")

    def row_ended(self, ending: str) -> FinishReason:
        """Why it ends, as its row has, by the name of its Ending; an error is noted."""
        reason = _REASONS.get(Ending[ending])
        if reason is not None:
            return reason
        wrong = f"a request ran in a program that does not serve it: {ending}"
        kind, message = _ERRORS.get(Ending[ending], (ErrorKind.WRONG_PROGRAM, wrong))
        if kind is ErrorKind.NOT_FINITE and self.sampling.restricts_tokens:
            kind = ErrorKind.NO_TOKEN
        self.fail(kind, message)
        return "error"

    def admitted(self, cached: int, waited: float, preemptions: int) -> None:
        """It got a row; its prompt is read from its beginning, perhaps again."""
        if self.waited is None:
            self.cached_tokens, self.waited = cached, waited
        self.preemptions = preemptions
        self.forget_prompt()

    def begin_again(self, statistics: RequestStatistics, grammar: Grammar | None) -> None:
        """Go back to the prompt, with nothing generated, read or counted.

        Lists that were handed out stay as they are: it gets new ones.
        """
        self.token_ids, self.statistics, self.grammar = [], statistics, grammar
        self.cached_tokens, self.waited, self.kept_tokens = 0, None, 0
        self.restarts += 1
        self._forget_text()

    def forget_prompt(self) -> None:
        """Nothing of it has been read."""
        if self.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    def add_prompt_logprobs(self, new: Iterable[TokenLogprob]) -> None:
        """Add those of the prompt's next tokens; what comes after the prompt is left out."""
        if self.prompt_logprobs is not None:
            missing = len(self.prompt) - len(self.prompt_logprobs)
            self.prompt_logprobs.extend(itertools.islice(new, missing))

    def request(self, now: float, timeout: float | None, group: str | None) -> Request:
        """What the scheduler must know of it."""
        sampling = self.sampling
        return Request(
            request_id=self.request_id,
            prompt=self.prompt,
            max_tokens=int(sampling.max_tokens),
            arrival=now,
            priority=int(sampling.priority),
            deadline=None if timeout is None else now + timeout,
            cache_salt=sampling.cache_salt,
            reads_all=sampling.prompt_logprobs is not None,
            group=group,
            masked=sampling.structured is not None or self.host_drafts,
            begins_free=self.phases is not None and not self.phases.masked,
            draft=self.draft,
            payload=self,
        )

    @property
    def done(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass
class Running:
    """A request that has not ended. Times are on the engine's clock.

    ``compile_seconds`` are those of the engine when it arrived.
    """

    generation: Generation
    arrived: float
    compile_seconds: float
    first_token: float | None = None

    def timings(self, now: float, compile_seconds: float) -> Timings:
        """Its times, if it ends now."""
        first = now if self.first_token is None else self.first_token
        return Timings(self.arrived, first, now, compile_seconds - self.compile_seconds)
