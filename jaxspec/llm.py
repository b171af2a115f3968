"""LLM: text generation from text prompts and chats."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from jaxspec import tokenizer as tokenizing  # chats load transformers when they are asked for
from jaxspec.built_in import BUILT_IN_MODEL
from jaxspec.config.cache import CacheConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.detokenizer import Detokenizer
from jaxspec.engine import Engine
from jaxspec.functional import EngineParams
from jaxspec.generation import Generation, Timings
from jaxspec.loading import load
from jaxspec.models.decoder import Decoder
from jaxspec.models.hf_config import load_model_config
from jaxspec.progress import progress_bar
from jaxspec.scheduling.requests import SamplingParams, check_count, check_requests
from jaxspec.speculation.drafters import Drafter
from jaxspec.tokenizer.text import Conversation, Prompt, TextTokenizer, tokenize
from jaxspec.weights.hub import resolve_directory

if TYPE_CHECKING:
    from jaxspec.tokenizer import Tokenizer

DEFAULT_MAX_LENGTH = 2048
_GREEDY_AND_SAMPLED = (SamplingParams(), SamplingParams(temperature=1.0))


@dataclasses.dataclass(frozen=True)
class TextChunk:
    """Newly generated text of one request; ``done`` marks the request's last chunk.

    ``index`` is the request's place in the caller's list. ``token_ids`` may be ahead of ``text``,
    as text that ends inside a character is held back.
    """

    index: int
    text: str
    token_ids: list[int]
    done: bool


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
      text: the text after the prompt, including a leading space.
      finish_reason: ``stop`` for a stop token (not part of the text), ``length``, ``cancelled``,
        ``timeout``, or ``error``.
      error: what went wrong; ``text`` is what was generated before the error.
      acceptance_length: mean tokens committed per round, bonus included.
      acceptance_by_depth: share of rounds that accepted at least 1, 2, ... drafted tokens.
      timings: timings of the request.
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
      max_batch: most requests that run together; further requests wait until one of them ends.
      rounds_per_call: most rounds of one call, after which the results are read.
      tokenizer: the model's, if it has been read already.

    Raises ValueError for files that cannot be loaded, and options that cannot be combined.
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
        tokenizer: TextTokenizer | None = None,
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
        self._text = tokenizer or TextTokenizer(model)
        length = _max_length(max_length, params.target.config.max_position)
        cache = CacheConfig(page_size, length, num_pages)
        self.engine = Engine(params, cache, max_rows=max_batch, rounds_per_call=rounds_per_call)
        self.max_batch = max_batch

    @property
    def tokenizer(self) -> "Tokenizer":
        """The model's tokenizer, as transformers has it."""
        return self._text.full

    @property
    def params(self) -> EngineParams:
        """The weights and all static options."""
        return self.engine.params

    def use_drafter(self, drafter: Drafter) -> None:
        """From the next request on, draft with other weights of the same shapes.

        Nothing is compiled again. Raises ValueError for other shapes or static fields.
        """
        self.engine.use_drafter(drafter)

    def use_target(self, target: Decoder) -> None:
        """The same as use_drafter, for the target."""
        self.engine.use_target(target)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete every prompt (text, or token ids), in order.

        Args:
          progress: show a progress bar with tokens/s and acceptance on stderr.

        Raises ValueError for a bad prompt or sampling value.
        """
        generations = self._add(prompts, sampling)
        with progress_bar(generations) if progress else nullcontext() as update:
            self.engine.finish(generations, update)
        return [
            self._completion(
                generation, self._detokenizer(generation).push(self._visible(generation), last=True)
            )
            for generation in generations
        ]

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        rounds_per_call: int = 4,
    ) -> Iterator[TextChunk | Completion]:
        """As generate, but yields text as it is generated: TextChunks, then Completions in order.

        The chunks of a request, concatenated, are the text of its Completion. Closing the stream
        early cancels its requests.
        """
        check_count("rounds_per_call", rounds_per_call)
        generations = self._add(prompts, sampling)
        texts = [_Text(generation, self._detokenizer(generation)) for generation in generations]
        try:
            while not all(text.done for text in texts):
                self.engine.step(rounds_per_call)
                for index, text in enumerate(texts):
                    chunk = text.next_chunk(index, self._visible(text.generation))
                    if chunk is not None:
                        yield chunk
            for text in texts:
                yield self._completion(text.generation, text.text)
        finally:
            for generation in generations:
                self.engine.cancel(generation)

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
          template_variables: further variables of the template, such as ``enable_thinking``.

        Raises ValueError for messages that the template refuses, and for a model without a
        template.
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
        """As chat, but yields text as it is generated (see stream)."""
        prompts = self.chat_prompts(messages, chat_template, template_variables)
        yield from self.stream(prompts, sampling, rounds_per_call)

    def chat_prompts(
        self,
        messages: Conversation | Sequence[Conversation],
        chat_template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> list[list[int]]:
        """The token ids of each conversation as chat passes them to generate.

        They include special tokens, and end where the assistant's answer begins.
        """
        return tokenizing.tokenize_chats(
            self.tokenizer, messages, chat_template, template_variables
        )

    def warm_up(
        self,
        batch_sizes: Sequence[int] = (1,),
        prompt_tokens: Sequence[int] = (64,),
        sampling: SamplingParams | Sequence[SamplingParams] = _GREEDY_AND_SAMPLED,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> float:
        """Compile the programs for requests of given sizes ahead of the first request.

        Sizes are rounded up to powers of two, as for requests: a batch of 3 uses the programs of 4,
        and a request of 600 prompt tokens and 200 new ones those of 1024.

        Args:
          prompt_tokens: lengths of prompts, without the new tokens (``sampling.max_tokens``).
          sampling: sampling of the requests; by default temperature 0 and 1. Only ``max_tokens``,
            and whether a request samples, have an effect.
          on_progress: called with the number of sizes that are ready and of all sizes.

        Returns the seconds it took. Raises ValueError for sizes that are invalid for requests.
        """
        started = time.perf_counter()
        for name, values in (("batch_sizes", batch_sizes), ("prompt_tokens", prompt_tokens)):
            for value in values:
                check_count(name, value)
        own = [sampling] if isinstance(sampling, SamplingParams) else sampling
        sets = sorted(itertools.product(batch_sizes, prompt_tokens, own), key=_size, reverse=True)
        for done, (batch_size, length, params) in enumerate(sets, 1):
            self.engine.prepare(batch_size, length, params)
            if on_progress is not None:
                on_progress(done, len(sets))
        return time.perf_counter() - started

    def _add(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[Generation]:
        tokens = tokenize(self._text, prompts)
        params = _for_each(sampling, len(tokens))
        return self.engine.add_all(tokens, params)

    def _detokenizer(self, generation: Generation) -> Detokenizer:
        return Detokenizer(self._text.decode, generation.prompt)

    def _visible(self, generation: Generation) -> list[int]:
        """The tokens without a final stop token."""
        ids, stops = generation.token_ids, self.engine.stop_ids(generation.sampling)
        return ids[:-1] if ids and ids[-1] in stops else ids

    def _completion(self, generation: Generation, text: str) -> Completion:
        statistics, seed = generation.statistics, generation.sampling.seed
        rounds = max(statistics.rounds, 1)
        assert generation.finish_reason and generation.timings and seed is not None
        return Completion(
            text=text,
            token_ids=generation.token_ids,
            prompt_token_ids=list(generation.prompt),
            finish_reason=generation.finish_reason,
            error=generation.error,
            seed=seed,
            num_rounds=statistics.rounds,
            num_drafted=statistics.drafted,
            acceptance_length=max(len(generation.token_ids) - 1, 0) / rounds,
            acceptance_by_depth=[count / rounds for count in statistics.accepted[1:]],
            timings=generation.timings,
        )


class _Text:
    """The text of a generation, as it grows."""

    def __init__(self, generation: Generation, detokenizer: Detokenizer):
        self.generation, self.text, self.done = generation, "", False
        self._detokenizer = detokenizer
        self._seen = self._pushed = 0  # tokens

    def next_chunk(self, index: int, visible: list[int]) -> TextChunk | None:
        """What is new since the last chunk; None: nothing."""
        ids, done = self.generation.token_ids, self.generation.done
        if self.done or (len(ids) == self._seen and not done):
            return None
        piece = self._detokenizer.push(visible[self._pushed :], last=done)
        new, self._seen, self._pushed = ids[self._seen :], len(ids), len(visible)
        self.text, self.done = self.text + piece, done
        return TextChunk(index, piece, new, done)


def decode_rate(completions: Sequence[Completion]) -> float:
    """Tokens a second of requests that were generated together, from the earliest first token to
    the last token; each one's first token comes from reading its prompt and does not count."""
    times = [completion.timings for completion in completions]
    seconds = max(t.finished for t in times) - min(t.first_token for t in times)
    return sum(len(c.token_ids) - 1 for c in completions) / seconds if seconds else 0.0


def check_prompts(
    model: str | Path,
    prompts: Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams],
    max_length: int | None = None,
    tokenizer: TextTokenizer | None = None,
) -> list[list[int]]:
    """The token ids of the prompts, after the checks of LLM and its generate.

    Only the model's config and tokenizer are read, so a bad prompt is found before the weights are
    loaded. ``tokenizer`` is the model's, if it has been read already.

    Raises the ValueErrors that LLM and generate would raise.
    """
    directory = resolve_directory(model)
    config = load_model_config(directory)
    length = _max_length(max_length, config.max_position)
    tokens = tokenize(tokenizer or TextTokenizer(directory), prompts)
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
