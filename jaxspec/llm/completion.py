"""Texts of requests: while they grow, and when they are finished."""

import dataclasses
from collections.abc import Iterable, Sequence

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.engine.generation import ErrorKind, Generation, RoundTree, Timings, TokenLogprob
from jaxspec.llm.tokenizer.detokenizer import Detokenizer, StopStrings


@dataclasses.dataclass(frozen=True)
class TextChunk:
    """Newly generated text of one request; ``done`` marks the request's last chunk.

    ``index`` is the request's place in the caller's list. ``token_ids`` may reach further than
    ``text``, as text that ends inside a character, or may begin a stop string, is held back.
    ``logprobs`` and ``policy_logprobs`` are those of ``token_ids``, and ``trees`` of the rounds
    since the last chunk, if they are asked for. ``version`` is that of the weights (see
    Engine.use_target).
    """

    index: int
    text: str
    token_ids: list[int]
    done: bool
    logprobs: list[TokenLogprob] | None = None
    trees: list[RoundTree] | None = None
    version: int = 0
    policy_logprobs: list[float] | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
      text: the text after the prompt, including a leading space, up to a stop string; empty where
        the model has no tokenizer.
      token_ids: the generated tokens, up to the one that ends the text.
      finish_reason: ``stop`` for a stop token or string (not part of the text), ``length``,
        ``cancelled``, ``timeout``, or ``error``.
      stop_string: that ended it; None: none did.
      error: what went wrong; ``text`` is what was generated before the error.
      error_kind: of the error; None: there is none.
      acceptance_length: mean tokens committed per round, bonus included.
      acceptance_by_depth: share of rounds that accepted at least 1, 2, ... drafted tokens.
      timings: timings of the request.
      cached_tokens: tokens of the prompt whose KV was found in the prefix cache, or read by another
        sample of the same prompt.
      logprobs: of each of token_ids; None: not asked for.
      policy_logprobs: the same as they were sampled (see SamplingParams).
      prompt_logprobs: of each of prompt_token_ids, None for the first; None: not asked for.
      cumulative_logprob: the sum over token_ids, if best_of or logprobs asks for it.
      trees: of its rounds; None: not asked for.
      queued: seconds until it began to run.
      version: of the weights that made it (see Engine.use_target).
      left_out_tokens: of the first of a prompt's completions: tokens that were generated for those
        samples that best_of has left out.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    error: str | None
    seed: int
    num_rounds: int
    num_drafted: int
    acceptance_length: float
    acceptance_by_depth: list[float]
    timings: Timings
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cumulative_logprob: float | None = None
    trees: list[RoundTree] | None = None
    left_out_tokens: int = 0
    error_kind: ErrorKind | None = None
    stop_string: str | None = None
    queued: float = 0.0
    policy_logprobs: list[float] | None = None
    version: int = 0


@dataclasses.dataclass(frozen=True)
class TextOptions:
    """What is part of a text: special tokens, and a stop string that ends it (``keep_stop``)."""

    skip_special: bool = False
    keep_stop: bool = False


WHOLE_TEXT = TextOptions()


class GrowingText:
    """The text of a generation, as it grows.

    Attributes:
      text: so far; what may still change is held back.
      stopped: whether a stop string has ended it.
    """

    def __init__(
        self,
        generation: Generation,
        detokenizer: Detokenizer,
        stops: Sequence[int],
        *,
        keep_stop: bool = False,
    ):
        """``stops`` are the tokens that end the text and are not part of it. With ``keep_stop``, a
        stop string that ends it is."""
        self.generation, self.text, self.done = generation, "", False
        self._detokenizer, self._stop_tokens = detokenizer, stops
        self._strings = StopStrings(generation.sampling.stop, keep=keep_stop)
        self._ids: list[int] = []
        self._pushed = 0  # tokens that the detokenizer has
        self._told = 0, 0, 0  # tokens, characters and rounds of the chunks so far

    @property
    def stopped(self) -> bool:
        return self._strings.found is not None

    @property
    def token_ids(self) -> list[int]:
        """The tokens so far, up to the one that completes a stop string."""
        return self._ids[: self._pushed] if self.stopped else self._ids

    def update(self) -> None:
        """Add the text of the generation's new tokens."""
        self.push(self.generation.token_ids[len(self._ids) :], self.generation.done)

    def push(self, token_ids: Sequence[int], ended: bool) -> None:
        """Add the text of new tokens. As ``update``, but reads nothing that another thread changes.

        Args:
          ended: they are the last ones.
        """
        ids = self._ids
        ids += token_ids
        if self.done or (len(ids) == self._pushed and not ended):
            return
        visible = ids[:-1] if ids and ids[-1] in self._stop_tokens else ids
        if self.generation.sampling.stop:
            self._push_one_by_one(visible, ended)
        else:
            self.text += self._detokenizer.push(visible[self._pushed :], last=ended)
            self._pushed = len(visible)
        self.done = ended or self.stopped

    def _push_one_by_one(self, visible: Sequence[int], ended: bool) -> None:
        """So it is known which token completes a stop string, however many came together."""
        least = self.generation.sampling.min_tokens
        while self._pushed < len(visible) and not self.stopped:
            token, self._pushed = visible[self._pushed], self._pushed + 1
            piece = self._detokenizer.push([token])
            self.text += self._strings.push(piece, search=self._pushed >= least)
        if ended and not self.stopped:
            self.text += self._strings.push(self._detokenizer.push([], last=True))
        if ended and not self.stopped:
            self.text += self._strings.rest()

    def next_chunk(self, index: int) -> TextChunk | None:
        """What is new since the last chunk; None: nothing."""
        tokens, characters, rounds = self._told
        ids = self.token_ids
        if len(ids) == tokens and not self.done:
            return None
        generation, new = self.generation, slice(tokens, len(ids))
        raw, of_policy = generation.logprobs, generation.policy_logprobs  # of these and maybe more
        known = generation.trees
        trees = None if known is None else known[rounds:]
        self._told = len(ids), len(self.text), rounds + len(trees or ())
        return TextChunk(
            index,
            self.text[characters:],
            ids[new],
            self.done,
            logprobs=None if raw is None else raw[new],
            trees=trees,
            version=generation.version,
            policy_logprobs=None if of_policy is None else of_policy[new],
        )

    def completion(self) -> Completion:
        """Once it is done, and its request has ended."""
        generation = self.generation
        statistics, seed = generation.statistics, generation.sampling.seed
        rounds, ids = max(statistics.rounds, 1), self.token_ids
        logprobs = None if generation.logprobs is None else generation.logprobs[: len(ids)]
        of_policy = generation.policy_logprobs
        assert generation.finish_reason and generation.timings and seed is not None
        return Completion(
            text=self.text,
            token_ids=ids,
            prompt_token_ids=list(generation.prompt),
            finish_reason="stop" if self.stopped else generation.finish_reason,
            error=None if self.stopped else generation.error,
            error_kind=None if self.stopped else generation.error_kind,
            seed=seed,
            num_rounds=statistics.rounds,
            num_drafted=statistics.drafted,
            acceptance_length=max(len(generation.token_ids) - 1, 0) / rounds,
            acceptance_by_depth=[count / rounds for count in statistics.accepted[1:]],
            timings=generation.timings,
            queued=generation.waited or 0.0,
            cached_tokens=generation.cached_tokens,
            logprobs=logprobs,
            prompt_logprobs=generation.prompt_logprobs,
            cumulative_logprob=None
            if logprobs is None
            else sum(entry.logprob for entry in logprobs),
            trees=generation.trees,
            stop_string=self._strings.found,
            policy_logprobs=None if of_policy is None else of_policy[: len(ids)],
            version=generation.version,
        )


def generated_tokens(completions: Sequence[Completion]) -> int:
    """All tokens that were generated for them: what best_of has left out counts, too."""
    return sum(len(completion.token_ids) + completion.left_out_tokens for completion in completions)


def decode_rate(completions: Sequence[Completion]) -> float:
    """Tokens a second of requests that were generated together, from the earliest first token to
    the last token; each one's first token comes from reading its prompt and does not count."""
    seconds = decode_seconds(completions)
    return sum(len(c.token_ids) - 1 for c in completions) / seconds if seconds else 0.0


def steady_rate(completions: Sequence[Completion]) -> float:
    """Tokens a second of requests that were generated together, each while it ran: what they give
    together if another takes the place of each that ends. Where texts differ in what they accept,
    ``decode_rate`` is that of the slowest. 0 if one has its first token only."""
    first = min(completion.timings.first_token for completion in completions)
    seconds = [completion.timings.finished - first for completion in completions]
    tokens = [len(completion.token_ids) - 1 for completion in completions]
    if not all(tokens) or not all(seconds):
        return 0.0
    return sum(count / time for count, time in zip(tokens, seconds, strict=True))


def decode_seconds(completions: Sequence[Completion]) -> float:
    """Seconds from the earliest first token to the last token, of requests generated together."""
    times = [completion.timings for completion in completions]
    return max(t.finished for t in times) - min(t.first_token for t in times)


def returned(
    completions: Iterable[Completion], sampling: Iterable[SamplingParams]
) -> list[Completion]:
    """The completions that a caller gets, of those of all samples of each prompt, in order."""
    rest = iter(completions)
    samples = ((params, [next(rest) for _ in range(params.num_samples)]) for params in sampling)
    return [completion for params, texts in samples for completion in _best(params, texts)]


def check_streams(sampling: Iterable[SamplingParams]) -> None:
    """Raise ValueError for requests whose texts cannot be streamed."""
    if any(params.num_samples > params.n for params in sampling):
        raise ValueError("best_of cannot be streamed, as all texts must end first: use n")


def _best(sampling: SamplingParams, samples: list[Completion]) -> list[Completion]:
    """The ``n`` most likely texts of a prompt, if more than those were generated."""
    if len(samples) == sampling.n:
        return samples
    ranked = sorted(samples, key=lambda sample: -(sample.cumulative_logprob or 0.0))
    kept = ranked[: sampling.n]
    if sampling.logprobs is None:  # they were computed to choose
        kept = [dataclasses.replace(sample, logprobs=None) for sample in kept]
    left_out = sum(len(sample.token_ids) for sample in ranked[sampling.n :])
    return [dataclasses.replace(kept[0], left_out_tokens=left_out), *kept[1:]]
