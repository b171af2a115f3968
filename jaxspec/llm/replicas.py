"""ReplicatedLLM: one AsyncLLM out of several that hold the same model on different devices."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from typing import Any, Self

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.engine.generation import ErrorKind
from jaxspec.llm.async_llm import AsyncLLM
from jaxspec.llm.completion import WHOLE_TEXT, Completion, TextChunk, TextOptions
from jaxspec.llm.llm import LLM
from jaxspec.llm.prompt_checks import for_each
from jaxspec.llm.tokenizer.prompts import Prompt
from jaxspec.scheduling.balancer import Balancer, Share
from jaxspec.scheduling.plan import QueueFull

WHOLE = ("stop", "length")  # how texts end that are done


class ReplicatedLLM:
    """Generates as an AsyncLLM does, with several of them.

    Each prompt goes to one of them, with all its samples: see scheduling.balancer.Balancer. The
    replicas share nothing: a text is the same whichever of them generates it.

    Args:
      replicas: of the same model with the same options. They are closed with this object.
    """

    def __init__(self, replicas: Sequence[AsyncLLM]):
        self.replicas = tuple(replicas)
        self.balancer = _balancer([replica.llm for replica in replicas])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def llm(self) -> LLM:
        """For what is the same in all: the tokenizer, the model's config, limits."""
        return self.replicas[0].llm

    async def close(self) -> None:
        """Cancel what is under way, and end the threads. May be called more than once."""
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    async def tokenize(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The token ids of each prompt, see LLM.tokenize."""
        return await self.replicas[0].tokenize(prompts)

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        timeout: float | None = None,
        options: TextOptions = WHOLE_TEXT,
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """See AsyncLLM.generate."""
        async with self._placed(prompts, sampling) as parts:
            lists = await _gather([part.generate(timeout, options, on_tokens) for part in parts])
        found: dict[int, list[Completion]] = {}
        for part, completions in zip(parts, lists, strict=True):
            rest = iter(completions)
            for place, params in zip(part.places, part.sampling, strict=True):
                found[place] = [next(rest) for _ in range(params.n)]
        return [completion for place in sorted(found) for completion in found[place]]

    async def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        timeout: float | None = None,
        options: TextOptions = WHOLE_TEXT,
    ) -> AsyncGenerator[TextChunk | Completion, None]:
        """See AsyncLLM.stream."""
        async with self._placed(prompts, sampling) as parts:
            streams = [part.stream(timeout, options) for part in parts]
            completions: dict[int, Completion] = {}
            ended = [iter(part.requests) for part in parts]
            async with contextlib.aclosing(_merged(streams)) as events:
                async for source, event in events:
                    if isinstance(event, Completion):
                        completions[next(ended[source])] = event
                    else:
                        index = parts[source].requests[event.index]
                        yield dataclasses.replace(event, index=index)
            for index in sorted(completions):
                yield completions[index]

    @contextlib.asynccontextmanager
    async def _placed(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> "AsyncGenerator[list[_Part], None]":
        """What each replica has to do; it counts as its load inside the ``with`` block."""
        tokens = await self.tokenize(prompts)
        each_sampling = for_each(sampling, len(tokens))
        self.llm.engine.check(tokens, each_sampling)  # so that what follows is of sane sizes
        parts: dict[int, _Part] = {}
        first = 0
        try:
            for place, (prompt, params) in enumerate(zip(tokens, each_sampling, strict=True)):
                share = self._place(prompt, params)
                part = parts.setdefault(share.engine, _Part(self.replicas[share.engine]))
                part.add(share, place, prompt, params, first)
                first += params.num_samples
            yield list(parts.values())
        finally:
            for part in parts.values():
                for share in part.shares:
                    self.balancer.end(share, part.works)

    def _place(self, prompt: Sequence[int], params: SamplingParams) -> Share:
        return self.balancer.place(
            prompt,
            int(params.max_tokens),
            requests=params.num_samples,
            namespace=params.cache_salt,
        )


@dataclasses.dataclass
class _Part:
    """What one replica does of a call.

    Attributes:
      places: of its prompts, in the call.
      requests: the place in the call of each request; a prompt has one for each sample.
      works: whether a text of it was done, or the replica has failed; None: neither.
    """

    replica: AsyncLLM
    shares: list[Share] = dataclasses.field(default_factory=list)
    prompts: list[list[int]] = dataclasses.field(default_factory=list)
    sampling: list[SamplingParams] = dataclasses.field(default_factory=list)
    places: list[int] = dataclasses.field(default_factory=list)
    requests: list[int] = dataclasses.field(default_factory=list)
    works: bool | None = None

    def add(
        self, share: Share, place: int, prompt: list[int], params: SamplingParams, first: int
    ) -> None:
        self.shares.append(share)
        self.prompts.append(prompt)
        self.sampling.append(params)
        self.places.append(place)
        self.requests += range(first, first + params.num_samples)

    async def generate(
        self,
        timeout: float | None,
        options: TextOptions,
        on_tokens: Callable[[int], None] | None,
    ) -> list[Completion]:
        with self._watched():
            completions = await self.replica.generate(
                self.prompts, self.sampling, timeout=timeout, options=options, on_tokens=on_tokens
            )
        self._see(completions)
        return completions

    async def stream(
        self, timeout: float | None, options: TextOptions
    ) -> AsyncGenerator[TextChunk | Completion, None]:
        events = self.replica.stream(self.prompts, self.sampling, timeout=timeout, options=options)
        with self._watched():
            async with contextlib.aclosing(events):
                async for event in events:
                    if isinstance(event, Completion):  # all have ended then
                        self._see([event])
                    yield event

    def _see(self, completions: Sequence[Completion]) -> None:
        if any(completion.error_kind is ErrorKind.INTERRUPTED for completion in completions):
            self.works = False
        elif self.works is None and any(
            completion.finish_reason in WHOLE for completion in completions
        ):
            self.works = True

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Notes an error that is not the request's."""
        try:
            yield
        except (ValueError, QueueFull):
            raise
        except Exception:
            self.works = False
            raise


def _balancer(llms: Sequence[LLM]) -> Balancer:
    """For engines that are all like the first."""
    engine = llms[0].engine
    limits = engine.limits
    return Balancer.of(len(llms), engine.config, limits.page_size, limits.num_pages)


async def _gather[T](work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results. When one fails, or the caller is cancelled, all have ended."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def _merged[T](streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T]]:
    """What several generators give, as it comes, each with the number of its generator.

    When one fails, or this one is closed, all are closed.
    """
    events: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue()

    async def read(source: int, stream: AsyncGenerator[T, None]) -> None:
        async with contextlib.aclosing(stream):
            async for event in stream:
                events.put_nowait((source, event))

    tasks = [asyncio.create_task(read(*numbered)) for numbered in enumerate(streams)]
    reading = asyncio.gather(*tasks)
    reading.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while (event := await events.get()) is not None:
            yield event
        await reading
    finally:
        reading.cancel()
        await _end([reading, *tasks])


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
