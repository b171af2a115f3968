"""LLM: text generation from text prompts and chats."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from jaxspec._lazy import LazyModule
from jaxspec.checkpoints.load import load_params
from jaxspec.checkpoints.load_options import method_takes_fields_of
from jaxspec.checkpoints.snapshots import is_snapshot
from jaxspec.config.cache import CacheConfig
from jaxspec.config.checks import check_count
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.decoding.all_reduce_buffers import without_exchanges
from jaxspec.decoding.drafters import Drafter
from jaxspec.decoding.functional import EngineParams
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import Generation
from jaxspec.engine.programs.several_processes import FollowingPrograms, make_programs
from jaxspec.engine.structured import GrammarCompiler
from jaxspec.engine.warm_up.compile_all import GREEDY_AND_SAMPLED
from jaxspec.engine.warm_up.compile_by_running import compile_by_running
from jaxspec.engine.weights.in_flight import InFlight
from jaxspec.llm import tokenizer as tokenizing  # chats load transformers when they are asked for
from jaxspec.llm.completion import (
    WHOLE_TEXT,
    Completion,
    GrowingText,
    TextChunk,
    TextOptions,
    check_streams,
    returned,
)
from jaxspec.llm.options import LLMOptions
from jaxspec.llm.progress_bar import progress_bar
from jaxspec.llm.prompt_checks import check_sampling, for_each
from jaxspec.llm.request_length import request_length
from jaxspec.llm.text_drafts.opening import drafted_on_host, open_text_drafter
from jaxspec.llm.tokenizer.detokenizer import Detokenizer
from jaxspec.llm.tokenizer.prompts import Conversation, Prompt
from jaxspec.llm.tokenizer.text import open_tokenizer, tokenize
from jaxspec.models.decoder import Decoder

if TYPE_CHECKING:
    from jaxspec.llm.tokenizer import Tokenizer

orbax_io = LazyModule("jaxspec.checkpoints.orbax_io")  # it loads orbax


class LLM:
    """A model that generates speculatively.

    >>> llm = LLM()
    >>> [completion] = llm.generate(["def read_config(path):"], SamplingParams(max_tokens=64))
    >>> print(completion.text)

    The arguments are the fields of LLMOptions, by name, and of LoadOptions, as for jaxspec.load:
    ``LLM(model, drafter, max_length=512)``.

    Raises ValueError for files that cannot be loaded, and options that cannot be combined.
    """

    @method_takes_fields_of(LLMOptions)
    def __init__(self, options: LLMOptions):
        asked, options = options, drafted_on_host(options)
        params = load_params(options)
        self._options = dataclasses.replace(options, target=None)  # for other weights
        self._text = options.tokenizer or open_tokenizer(options.model)
        length = request_length(options, params)
        self.engine = Engine(
            params,
            CacheConfig(options.page_size, length, options.num_pages, options.kv_memory),
            options.engine,
            make_matcher=lambda spec: self.grammars.matcher(spec),
            make_programs=make_programs(options.processes),
            host_drafter=open_text_drafter(asked, params, self._text, length),
        )

    @classmethod
    def from_options(cls, options: LLMOptions) -> Self:
        """The LLM of these options."""
        return cls(**vars(options))

    def follow(self) -> bool:
        """Run what process 0 launches until it ends, and return True. False, at once, in process 0,
        and where there is only one."""
        if not isinstance(self.engine.programs, FollowingPrograms):
            return False
        self.engine.programs.follow()
        return True

    @functools.cached_property
    def grammars(self) -> GrammarCompiler:
        """The compiler of structured outputs. Raises ValueError if there cannot be one."""
        config = self.params.target.config
        text = tokenizing.tokenizer_json(self.tokenizer)
        return GrammarCompiler(text, config.vocab_size, config.stop_token_ids)

    @property
    def tokenizer(self) -> "Tokenizer":
        """The model's tokenizer, as transformers has it."""
        return self._text.full

    @property
    def params(self) -> EngineParams:
        """The weights and all static options."""
        return self.engine.params

    def use_target(
        self, target: Decoder, *, version: int | None = None, in_flight: InFlight = "refuse"
    ) -> None:
        """Generate with other weights of the same shapes, see Engine.use_target. Requests of
        ``stream`` stream."""
        self.engine.use_target(target, version=version, in_flight=in_flight)

    def use_drafter(self, drafter: Drafter, *, in_flight: InFlight = "refuse") -> None:
        """Draft with other weights of the same shapes, see Engine.use_drafter."""
        self.engine.use_drafter(drafter, in_flight=in_flight)

    def load_weights(
        self, model: str | Path, drafter: str | None = None
    ) -> tuple[Decoder, Drafter | None]:
        """The weights of another directory, and of a drafter, for use_target and use_drafter.

        They are loaded as these were, beside those in use. Either may be a step of a training run:
        ``params.target`` of its model as orbax_io.save_pytree has written it; then both are.

        Raises ValueError for what cannot be loaded, and where several processes share the model.
        """
        if self._options.processes is not None:
            raise ValueError("weights that several processes share cannot be changed")
        if is_snapshot(model):
            used, restore = without_exchanges(self.params), orbax_io.restore_pytree
            target = restore(model, used.target)
            return target, None if drafter is None else restore(drafter, used.drafter)
        wanted: dict[str, Any] = {"drafter": drafter}
        if drafter is None:
            wanted = {"drafter": "none", "drafter_bits": None, "speculation": None}
        params = load_params(dataclasses.replace(self._options, model=model, **wanted))
        return params.target, None if drafter is None else params.drafter

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        progress: bool = False,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> list[Completion]:
        """Complete every prompt (text, or token ids), in order.

        Returns one completion a prompt; with ``n`` above 1 that many, one after the other: in the
        order of their seeds, or with ``best_of`` the most likely first.

        Args:
          progress: show a progress bar with tokens/s and acceptance on stderr.
          drafts: token ids of an old text for each sample of each prompt in turn, or () for none:
            see Engine.add.

        Raises ValueError for a bad prompt or sampling value, and for drafts that cannot be used.
        """
        texts = self._add(prompts, sampling, streams=False, drafts=drafts)
        with_stop = [text for text in texts if text.generation.sampling.stop]
        bar = progress_bar([text.generation for text in texts]) if progress else nullcontext()
        try:
            with bar as update:
                while not all(text.generation.done for text in texts):
                    self._step(with_stop)
                    if update is not None:
                        update()
        finally:
            self._cancel(texts)
        for text in texts:
            text.update()
        completions = [text.completion() for text in texts]
        return returned(completions, for_each(sampling, len(prompts)))

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        rounds_per_call: int = 4,
    ) -> Iterator[TextChunk | Completion]:
        """The text of every prompt as it is generated: TextChunks, then Completions in order.

        The chunks of a request, concatenated, are the text of its Completion. Closing the stream
        early cancels its requests. With ``n`` above 1 each text is a request, as in the list that
        generate returns.

        Raises ValueError for ``best_of`` above ``n``, besides what generate raises it for.
        """
        check_count("rounds_per_call", rounds_per_call)
        check_streams(for_each(sampling, len(prompts)))
        texts = self._add(prompts, sampling, streams=True)
        running = list(enumerate(texts))
        try:
            while running:
                self._step([text for _, text in running], rounds_per_call)
                for index, text in running:
                    chunk = text.next_chunk(index)
                    if chunk is not None:
                        yield chunk
                running = [(index, text) for index, text in running if not text.done]
            for text in texts:
                yield text.completion()
        finally:
            self._cancel(texts)

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
        return self.generate(prompts, self.chat_sampling(sampling, chat_template))

    def stream_chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams],
        rounds_per_call: int = 4,
        *,
        chat_template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> Iterator[TextChunk | Completion]:
        """The answers of ``chat`` as they are generated; see stream."""
        prompts = self.chat_prompts(messages, chat_template, template_variables)
        sampling = self.chat_sampling(sampling, chat_template)
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

    def chat_sampling(
        self,
        sampling: SamplingParams | Sequence[SamplingParams],
        chat_template: str | None = None,
    ) -> SamplingParams | list[SamplingParams]:
        """Sampling as chat passes it to generate: the text ends with the assistant's turn, too."""
        turn_end = self.turn_end(chat_template)
        if isinstance(sampling, SamplingParams):
            return sampling.ending_at(turn_end)
        check_sampling(sampling)
        return [params.ending_at(turn_end) for params in sampling]

    def turn_end(self, chat_template: str | None = None) -> tuple[int, ...]:
        """The special token that ends the assistant's turns in the chat template, if it has one
        that is not among the model's stop tokens."""
        config = self.params.target.config
        ids = self._text.turn_end(chat_template)
        return tuple(i for i in ids if i < config.vocab_size and i not in config.stop_token_ids)

    def warm_up(
        self,
        batch_sizes: Sequence[int] = (1,),
        prompt_tokens: Sequence[int] = (64,),
        sampling: SamplingParams | Sequence[SamplingParams] = GREEDY_AND_SAMPLED,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> float:
        """Compile the programs for requests of given sizes before the first request.

        Sizes are rounded up to powers of two, as for requests: a batch of 3 uses the programs of 4,
        and a request of 600 prompt tokens and 200 new ones those of 1024. An adaptive engine
        compiles for all numbers of rows and lengths up to the largest, see Engine.warm_up.

        Args:
          prompt_tokens: lengths of prompts, without the new tokens (``sampling.max_tokens``).
          sampling: sampling of the requests; by default temperature 0 and 1. Only ``max_tokens``
            has an effect, and whether a request samples, or has bias, penalties or logprobs.
          on_progress: called with the number of sizes that are ready and of all sizes.

        Returns the seconds it took. Raises ValueError for sizes that are invalid for requests.
        """
        started = time.perf_counter()
        ways = [sampling] if isinstance(sampling, SamplingParams) else sampling
        if not (len(batch_sizes) and len(prompt_tokens) and len(ways)):
            raise ValueError("batch_sizes, prompt_tokens and sampling must not be empty")
        for name, values in (("batch_sizes", batch_sizes), ("prompt_tokens", prompt_tokens)):
            for value in values:
                check_count(name, value)
        if self.engine.config.adaptive:
            tokens = max(prompt_tokens) + max(int(params.max_tokens) for params in ways)
            return self.engine.warm_up(ways, tokens=tokens, on_progress=on_progress)
        sets = sorted(itertools.product(batch_sizes, prompt_tokens, ways), key=_size, reverse=True)
        for done, (batch_size, length, params) in enumerate(sets, 1):
            compile_by_running(self.engine, batch_size, length, params)
            if on_progress is not None:
                on_progress(done, len(sets))
        return time.perf_counter() - started

    def tokenize(self, prompts: Sequence[Prompt], *, special: bool = True) -> list[list[int]]:
        """The token ids of each prompt as generate has them; ids stay as they are.

        Args:
          special: with the tokens that the tokenizer puts around every text, as ``<bos>``.

        Raises ValueError for what is neither text nor a list of ids, and for empty text.
        """
        return tokenize(self._text, prompts, special=special)

    def detokenize(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of tokens, special ones included unless ``skip_special``."""
        return self._text.decode(token_ids, skip_special=skip_special)

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token that may be a part of a character, see TextTokenizer."""
        return self._text.token_bytes(token_id)

    def growing_text(
        self, generation: Generation, options: TextOptions = WHOLE_TEXT
    ) -> GrowingText:
        """The text of a request of this engine, to be told its tokens."""
        self._text.check_stops(bool(generation.sampling.stop))
        decode = functools.partial(self._text.decode, skip_special=options.skip_special)
        stops = self.engine.stop_ids(generation.sampling)
        detokenizer = Detokenizer(decode, generation.prompt)
        return GrowingText(generation, detokenizer, stops, keep_stop=options.keep_stop)

    def _add(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        streams: bool,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> list[GrowingText]:
        tokens = self.tokenize(prompts)
        params = for_each(sampling, len(tokens))
        self._text.check_stops(any(each.stop for each in params))
        added = self.engine.add_all(tokens, params, streams=streams, drafts=drafts)
        return [self.growing_text(generation) for generation in added]

    def _cancel(self, texts: Sequence[GrowingText]) -> None:
        for text in texts:
            self.engine.cancel(text.generation)

    def _step(self, texts: Sequence[GrowingText], most_rounds: int | None = None) -> None:
        """A step of the engine. These texts grow, and requests end whose text has ended."""
        self.engine.step(most_rounds)
        for text in texts:
            text.update()
            if text.stopped:
                self.engine.cancel(text.generation, "stop")


def _size(warm_up: tuple[int, int, SamplingParams]) -> int:
    batch_size, length, params = warm_up
    return batch_size * (length + params.max_tokens)
