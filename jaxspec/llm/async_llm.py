"""AsyncLLM: streams of text for asyncio, from an LLM whose engine runs in a thread of its own."""

import asyncio
import contextlib
import operator
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.decoding.drafters import Drafter
from jaxspec.engine.async_engine import AsyncEngine, Chunk
from jaxspec.engine.engine import Engine
from jaxspec.engine.host_drafter import drafts_on_host
from jaxspec.engine.structured import GrammarCompiler
from jaxspec.engine.warm_up.compile_kinds import CompilesKinds, RequestKind
from jaxspec.engine.weights.in_flight import InFlight
from jaxspec.llm.completion import (
    WHOLE_TEXT,
    Completion,
    GrowingText,
    TextChunk,
    TextOptions,
    check_streams,
    returned,
)
from jaxspec.llm.llm import LLM
from jaxspec.llm.prompt_checks import for_each
from jaxspec.llm.tokenizer.prompts import Prompt
from jaxspec.models.decoder import Decoder
from jaxspec.scheduling.plan import QueueFull

LONG_TEXT = 20_000  # characters of a prompt that is tokenized beside the event loop
GRAMMAR_THREADS = 2
GRAMMAR_SECONDS = 0.9  # until a grammar is compiled; its CPU time has a limit of its own


class AsyncTexts:
    """What AsyncLLM and ReplicatedLLM have in common. A context manager, which closes them.

    Attributes:
      llm: for what is the same in all replicas: the tokenizer, the model's config, limits.
    """

    llm: LLM

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is under way, and end the threads. May be called more than once."""
        raise NotImplementedError

    def events(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        timeout: float | None,
        options: TextOptions,
        streams: bool,
    ) -> AsyncGenerator[TextChunk | Completion, None]:
        """What ``stream`` gives; of every sample, where best_of will leave some out.

        ``streams``: see Engine.add. Else texts may be taken back, and their chunks come anew.
        """
        raise NotImplementedError

    async def use_target(
        self, target: Decoder, *, version: int | None = None, in_flight: InFlight = "refuse"
    ) -> None:
        """See Engine.use_target: requests of ``stream`` stream, those of ``generate`` do not.
        Returns when the weights are in use, or others that were given later."""
        raise NotImplementedError

    async def use_drafter(self, drafter: Drafter, *, in_flight: InFlight = "refuse") -> None:
        """The same for a drafter, see Engine.use_drafter."""
        raise NotImplementedError

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        timeout: float | None = None,
        options: TextOptions = WHOLE_TEXT,
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Complete every prompt; see LLM.generate for what is returned, and stream for the rest.

        ``on_tokens`` is told how many new tokens there are, whenever some come: so it is known what
        was generated if this is cancelled.
        """
        completions: list[Completion] = []
        events = self.events(prompts, sampling, timeout, options, streams=False)
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, Completion):
                    completions.append(event)
                elif on_tokens is not None:
                    on_tokens(len(event.token_ids))
        return returned(completions, for_each(sampling, len(prompts)))

    async def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        timeout: float | None = None,
        options: TextOptions = WHOLE_TEXT,
    ) -> AsyncGenerator[TextChunk | Completion, None]:
        """Text as it is generated: TextChunks, then Completions in order; see LLM.stream.

        When the task is cancelled, or the generator closed, its requests are cancelled, and their
        pages are free in the next plan.

        Args:
          timeout: seconds after which requests end with the finish_reason ``timeout``.
          options: what is part of the texts.

        Raises ValueError for requests that could not run, and for ``best_of`` above ``n``;
        QueueFull if too many wait; RuntimeError if it is closed.
        """
        check_streams(for_each(sampling, len(prompts)))
        events = self.events(prompts, sampling, timeout, options, streams=True)
        async with contextlib.aclosing(events):
            async for event in events:
                yield event


class AsyncLLM(AsyncTexts):
    """Generates text for many requests at once.

    >>> async with AsyncLLM(LLM()) as llm:
    ...     [completion] = await llm.generate(["def f("], SamplingParams())
    ...     async for event in llm.stream(["def f("], SamplingParams()):
    ...         print(event.text)

    The LLM's engine belongs to a thread of this object from now on (see AsyncEngine). Close it, or
    the engine's memory stays in use.

    Args:
      most_rounds, on_chunk: see AsyncEngine.
      holds_back: in an engine whose programs are sealed, hold back requests of a kind that no
        program serves, until one has been compiled beside the work of others, and compile programs
        of their own for kinds that come often.
    """

    def __init__(
        self,
        llm: LLM,
        most_rounds: int | None = None,
        on_chunk: Callable[[Chunk], None] | None = None,
        *,
        holds_back: bool = False,
    ):
        self.llm = llm
        self._kinds = CompilesKinds() if holds_back else None
        self.engine = AsyncEngine(llm.engine, most_rounds, on_chunk)
        self._compilers = ThreadPoolExecutor(GRAMMAR_THREADS, "jaxspec grammar")

    @property
    def holds(self) -> bool:
        """Whether requests are held back until their programs are there."""
        return self._kinds is not None and self._kinds.held > 0

    @property
    def replicas(self) -> "tuple[AsyncLLM, ...]":
        """Those that generate: this one alone; see ReplicatedLLM."""
        return (self,)

    async def close(self) -> None:
        self._compilers.shutdown(wait=False)
        if self._kinds is not None:
            self._kinds.close()
        await self.engine.close()

    async def run[T](self, function: Callable[[Engine], T]) -> T:
        """See AsyncEngine.run."""
        return await self.engine.run(function)

    async def use_target(
        self, target: Decoder, *, version: int | None = None, in_flight: InFlight = "refuse"
    ) -> None:
        await self.engine.use_target(target, version=version, in_flight=in_flight)

    async def use_drafter(self, drafter: Drafter, *, in_flight: InFlight = "refuse") -> None:
        await self.engine.use_drafter(drafter, in_flight=in_flight)

    async def tokenize(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The token ids of each prompt, see LLM.tokenize."""
        if sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) > LONG_TEXT:
            return await asyncio.to_thread(self.llm.tokenize, prompts)
        return self.llm.tokenize(prompts)

    async def events(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        timeout: float | None,
        options: TextOptions,
        streams: bool,
    ) -> AsyncGenerator[TextChunk | Completion, None]:
        tokens = await self.tokenize(prompts)
        params = for_each(sampling, len(tokens))
        await self._compile_grammars(params)
        await self._compile_programs(tokens, params)
        texts: dict[int, GrowingText] = {}
        restarts: dict[int, int] = {}
        chunks = self.engine.generate_all(tokens, params, timeout=timeout, streams=streams)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                text = texts.get(chunk.index)
                if text is None or restarts[chunk.index] != chunk.restarts:
                    text = texts[chunk.index] = self.llm.growing_text(chunk.generation, options)
                    restarts[chunk.index] = chunk.restarts
                if text.done:  # the engine did not know yet that the text had ended
                    continue
                text.push(chunk.token_ids, chunk.done)
                if text.stopped:
                    self.engine.end(chunk)
                new = text.next_chunk(chunk.index)
                if new is not None:
                    yield new
        for index in sorted(texts):
            yield texts[index].completion()

    async def _compile_grammars(self, sampling: Sequence[SamplingParams]) -> None:
        """Beside the event loop and the engine; the engine then finds them compiled."""
        for spec in {params.structured for params in sampling if params.structured is not None}:
            if self.llm.grammars.is_known(spec):
                self.llm.grammars.matcher(spec)  # or why there is none
            else:
                await self.compile(operator.methodcaller("matcher", spec), spec.kind)

    async def _compile_programs(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
    ) -> None:
        """Wait until the programs of such requests are there. Raises QueueFull if too many wait."""
        compiles, programs = self._kinds, self.llm.engine.programs
        if compiles is None:
            return
        self.llm.engine.check(prompts, sampling)
        pairs = zip(prompts, sampling, strict=True)
        kinds = [
            RequestKind.of(
                prompt, each, programs.sizes, host_drafts=drafts_on_host(programs.params, each)
            )
            for prompt, each in pairs
        ]
        await compiles.wait_for(kinds, self.run, self.llm.engine.config.max_queue)

    async def compile[T](self, work: Callable[[GrammarCompiler], T], name: str = "grammar") -> T:
        """The result of work that compiles grammars, in threads that nothing else waits for.

        Raises QueueFull if too much of it waits, ValueError if it takes too long, with its name,
        and what the work raises.
        """
        compiling = self._compilers.submit(work, self.llm.grammars)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(compiling), GRAMMAR_SECONDS)
        except TimeoutError:
            if compiling.cancelled():  # it has not begun: others compile theirs
                raise QueueFull("too many grammars wait to be compiled") from None
            raise ValueError(f"{name}: it takes too long to compile: make it smaller") from None
