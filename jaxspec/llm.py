"""Text in, text out."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jax.sharding import Mesh

from jaxspec.batch_run import Run, Timings
from jaxspec.config import CacheConfig, SpeculationConfig
from jaxspec.detokenizer import Detokenizer
from jaxspec.engine import Engine
from jaxspec.functional import EngineParams
from jaxspec.loading import BUILT_IN_MODEL, load
from jaxspec.models.decoder import Decoder
from jaxspec.models.hf_config import load_model_config
from jaxspec.scheduling.requests import SamplingParams, check_count, check_requests
from jaxspec.speculation.drafters import Drafter
from jaxspec.state import Ending
from jaxspec.tokenizer import Conversation, Prompt, load_tokenizer, tokenize, tokenize_chats
from jaxspec.weights.hub import resolve_directory

DEFAULT_MAX_LENGTH = 2048
_GREEDY_AND_SAMPLED = (SamplingParams(), SamplingParams(temperature=1.0))


@dataclasses.dataclass(frozen=True)
class TextChunk:
    """Newly generated text of request ``index`` of the caller's; ``done`` after the last one.

    ``token_ids`` may be ahead of ``text``: what ends inside a character waits for the rest of it.
    """

    index: int
    text: str
    token_ids: list[int]
    done: bool


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
      text: what follows the prompt, a leading space included.
      finish_reason: ``stop`` for a stop token (not part of the text), ``length``, or ``error``.
      error: what went wrong; the text before it stands.
      acceptance_length: mean tokens committed a round, bonus included.
      acceptance_by_depth: share of rounds that accepted at least 1, 2, ... drafted tokens.
      timings: of the batch that the request ran in.
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


class LLM:
    """A model that generates speculatively.

    >>> llm = LLM()
    >>> [completion] = llm.generate(["def read_config(path):"], SamplingParams(max_tokens=64))
    >>> print(completion.text)

    Args:
      model, drafter, speculation, dtype, mesh, shard_drafter, kernels: see loading.load.
      page_size, num_pages: see config.CacheConfig.
      max_length: most tokens of a request, prompt included; by default what the model allows, at
        most 2048.
      max_batch: most requests that run together; more are served in turns.
      rounds_per_call: rounds between two looks at the results.

    Raises ValueError for anything that cannot be loaded or combined.
    """

    def __init__(
        self,
        model: str | Path = BUILT_IN_MODEL,
        drafter: str | Path | Drafter = "auto",
        *,
        speculation: SpeculationConfig | None = None,
        dtype: str | None = None,
        mesh: Mesh | None = None,
        shard_drafter: bool = False,
        kernels: str = "auto",
        page_size: int = 16,
        max_length: int | None = None,
        num_pages: int | None = None,
        max_batch: int = 16,
        rounds_per_call: int = 32,
    ):
        check_count("max_batch", max_batch)
        check_count("rounds_per_call", rounds_per_call)
        params = load(
            model,
            drafter,
            speculation=speculation,
            dtype=dtype,
            mesh=mesh,
            shard_drafter=shard_drafter,
            kernels=kernels,
        )
        self.tokenizer = load_tokenizer(model)
        length = _max_length(max_length, params.target.config.max_position)
        cache = CacheConfig(page_size, length, num_pages)
        self.engine = Engine(params, cache, max_rows=max_batch, rounds_per_call=rounds_per_call)
        self.max_batch = max_batch

    @property
    def params(self) -> EngineParams:
        """The weights, and every static choice."""
        return self.engine.params

    def use_drafter(self, drafter: Drafter) -> None:
        """From the next request on, draft with other weights of the same shapes.

        Nothing is compiled again. Raises ValueError for a drafter of other shapes or choices.
        """
        self.engine.use_drafter(drafter)

    def use_target(self, target: Decoder) -> None:
        """As use_drafter, for the target."""
        self.engine.use_target(target)

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Complete every prompt (text, or token ids), in order.

        Raises ValueError for a bad prompt or sampling value.
        """
        completions = []
        for _, batch, params in self._batches(prompts, sampling):
            run, token_ids = Run(self.engine, batch, params), [[] for _ in batch]
            try:
                for progress in run:
                    for ids, new in zip(token_ids, progress.new_tokens, strict=True):
                        ids.extend(new)
            finally:
                run.abort()
            texts = [
                self._detokenizer(prompt).push(self._visible(ids, own), last=True)
                for prompt, ids, own in zip(batch, token_ids, params, strict=True)
            ]
            completions += _completions(run, token_ids, texts)
        return completions

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        rounds_per_call: int = 4,
    ) -> Iterator[TextChunk | Completion]:
        """As generate, giving text as it comes: TextChunks, then each batch's Completions in order.

        The chunks of a request join to its Completion's text. A stream that is closed before its
        end frees the engine at once.
        """
        for start, batch, params in self._batches(prompts, sampling):
            run = Run(self.engine, batch, params, rounds_per_call)
            try:
                yield from self._stream_batch(run, start)
            finally:
                run.abort()

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        chat_template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """The assistant's answer to one conversation, or to each of several, in order.

        >>> [answer] = llm.chat([{"role": "user", "content": "Hello!"}], SamplingParams())

        Args:
          messages: objects with ``role`` and ``content``, or a list of such lists.
          chat_template: a Jinja template; by default the model's own.
          template_variables: what the template reads beside messages, such as ``enable_thinking``.

        Raises ValueError for messages that the template refuses, and for a model without one.
        """
        prompts = self.chat_prompts(messages, chat_template, template_variables)
        return self.generate(prompts, sampling)

    def stream_chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams],
        rounds_per_call: int = 4,
        *,
        chat_template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> Iterator[TextChunk | Completion]:
        """As chat, giving text as it comes (see stream)."""
        prompts = self.chat_prompts(messages, chat_template, template_variables)
        yield from self.stream(prompts, sampling, rounds_per_call)

    def chat_prompts(
        self,
        messages: Conversation | Sequence[Conversation],
        chat_template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> list[list[int]]:
        """What chat gives to generate: the token ids of each conversation, special ones included,
        up to where the assistant answers."""
        return tokenize_chats(self.tokenizer, messages, chat_template, template_variables)

    def warm_up(
        self,
        batch_sizes: Sequence[int] = (1,),
        prompt_tokens: Sequence[int] = (64,),
        sampling: SamplingParams | Sequence[SamplingParams] = _GREEDY_AND_SAMPLED,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> float:
        """Compile the programs of such requests, so that the first one waits for none.

        Sizes are rounded up to powers of two, as those of requests are: a batch of 3 runs the
        programs of 4, and one of 600 prompt tokens and 200 new ones those of 1024. Programs are
        compiled for the memory of the largest batch: name that too.

        Args:
          prompt_tokens: lengths of prompts; ``sampling.max_tokens`` come on top.
          sampling: requests to prepare for; by default of temperature 0 and 1. Only their
            ``max_tokens``, and whether they sample, matter.
          on_progress: called with the number of programs' sets that are ready and their total.

        Returns the seconds it took. Raises ValueError for sizes that no request may have.
        """
        started = time.perf_counter()
        for name, values in (("batch_sizes", batch_sizes), ("prompt_tokens", prompt_tokens)):
            for value in values:
                check_count(name, value)
        own = [sampling] if isinstance(sampling, SamplingParams) else sampling
        sets = sorted(itertools.product(batch_sizes, prompt_tokens, own), key=_size, reverse=True)
        for done, (batch_size, length, params) in enumerate(sets, 1):
            run = Run(self.engine, [[0] * length] * batch_size, [params] * batch_size)
            try:
                run.prepare()
            finally:
                run.abort()
            if on_progress is not None:
                on_progress(done, len(sets))
        return time.perf_counter() - started

    def _stream_batch(self, run: Run, start: int) -> Iterator[TextChunk | Completion]:
        """``start``: the index of the batch's first request in the caller's list."""
        plan = run.plan
        token_ids: list[list[int]] = [[] for _ in plan.prompts]
        texts, ended = ["" for _ in plan.prompts], [False for _ in plan.prompts]
        detokenizers = [self._detokenizer(prompt) for prompt in plan.prompts]
        for progress in run:
            for row, new in enumerate(progress.new_tokens):
                if ended[row]:
                    continue
                token_ids[row].extend(new)
                done = ended[row] = progress.done[row]
                visible = self._visible(new, plan.sampling[row])
                piece = detokenizers[row].push(visible, last=done)
                texts[row] += piece
                yield TextChunk(start + row, piece, new, done)
        yield from _completions(run, token_ids, texts)

    def _batches(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> Iterator[tuple[int, list[list[int]], list[SamplingParams]]]:
        """The first index, token prompts and sampling of batches that fit together."""
        tokens = tokenize(self.tokenizer, prompts)
        params = _for_each(sampling, len(tokens))
        for batch in self.engine.batches(tokens, params):
            yield batch.start, tokens[batch], params[batch]

    def _detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        return Detokenizer(self._decode, prompt)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids))

    def _visible(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """Tokens without the one that ended the text, if it is there."""
        stops = self.engine.stop_ids(params)
        return token_ids[:-1] if token_ids and token_ids[-1] in stops else token_ids


def _completions(run: Run, outputs: list[list[int]], texts: list[str]) -> Iterator[Completion]:
    plan = run.plan
    rows = zip(
        plan.prompts, plan.sampling, outputs, texts, run.statistics, run.endings, strict=True
    )
    for prompt, params, token_ids, text, stats, ending in rows:
        rounds = max(stats.rounds, 1)
        assert params.seed is not None, "a plan gives every request a seed"
        yield Completion(
            text=text,
            token_ids=token_ids,
            prompt_token_ids=list(prompt),
            finish_reason=_FINISH_REASONS.get(ending, "error"),
            error=_ERRORS.get(ending),
            seed=params.seed,
            num_rounds=stats.rounds,
            num_drafted=stats.drafted,
            acceptance_length=max(len(token_ids) - 1, 0) / rounds,
            acceptance_by_depth=[count / rounds for count in stats.accepted[1:]],
            timings=run.timings,
        )


_FINISH_REASONS = MappingProxyType({Ending.STOP: "stop", Ending.LENGTH: "length"})
_ERRORS = MappingProxyType(
    {
        Ending.NOT_FINITE: "the model's logits were not finite numbers: its weights are broken, "
        "its dtype is too narrow for them, or the request's options allow no token",
        Ending.TOO_LONG: "the prompt and its limit do not fit the cache",
        Ending.NOT_GREEDY: "a sampled request ran in a program for greedy ones",
        Ending.UNCONTROLLED: "a request with penalties or bias ran in a program without them",
    }
)


def check_prompts(
    model: str | Path,
    prompts: Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams],
    max_length: int | None = None,
) -> list[list[int]]:
    """The prompts' token ids, if an LLM of this model and max_length could take them.

    Reads the model's config and tokenizer, and no weights: a script can refuse a bad prompt at
    once. Raises ValueError as LLM and its generate would.
    """
    directory = resolve_directory(model)
    config = load_model_config(directory)
    length = _max_length(max_length, config.max_position)
    tokens = tokenize(load_tokenizer(directory), prompts)
    params = _for_each(sampling, len(tokens))
    check_requests(tokens, params, config.vocab_size, length, config.max_position)
    return tokens


def _for_each(
    sampling: SamplingParams | Sequence[SamplingParams], count: int
) -> list[SamplingParams]:
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    if not isinstance(sampling, (list, tuple)):
        kind = type(sampling).__name__
        raise ValueError(f"sampling must be SamplingParams, or a list of them, not {kind}")
    return list(sampling)


def _size(warm_up: tuple[int, int, SamplingParams]) -> int:
    batch_size, length, params = warm_up
    return batch_size * (length + params.max_tokens)


def _max_length(wanted: int | None, limit: int) -> int:
    if wanted is not None:
        check_count("max_length", wanted)
    if wanted is not None and wanted > limit:
        raise ValueError(f"max_length {wanted} exceeds the model's {limit} positions")
    return min(limit, DEFAULT_MAX_LENGTH) if wanted is None else wanted
