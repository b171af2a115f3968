"""ReplicatedLLM: one AsyncLLM out of several that hold the same model on different devices."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Sequence

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.decoding.drafters import Drafter
from jaxspec.engine.generation import ErrorKind
from jaxspec.engine.weights.in_flight import InFlight, rule_for
from jaxspec.llm.async_llm import AsyncLLM, AsyncTexts
from jaxspec.llm.completion import Completion, TextChunk, TextOptions
from jaxspec.llm.prompt_checks import for_each
from jaxspec.llm.tokenizer.prompts import Prompt
from jaxspec.models.decoder import Decoder
from jaxspec.scheduling.balancer import Balancer, Share
from jaxspec.scheduling.plan import QueueFull

WHOLE = ("stop", "length")  # how texts end that are done


class ReplicatedLLM(AsyncTexts):
    """Generates as an AsyncLLM does, with several of them.

    Each prompt goes to one of them, with all its samples: see scheduling.balancer.Balancer. The
    replicas share nothing: a text is the same whichever of them generates it.

    Args:
      replicas: of the same model with the same options. They are closed with this object.
    """

    def __init__(self, replicas: Sequence[AsyncLLM]):
        self.replicas = tuple(replicas)
        self.llm = replicas[0].llm
        engine = self.llm.engine  # all are like the first
        limits = engine.limits
        self.balancer = Balancer.of(
            len(replicas), engine.config, limits.page_size, limits.num_pages
        )

    async def close(self) -> None:
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    async def use_target(
        self, target: Decoder, *, version: int | None = None, in_flight: InFlight = "refuse"
    ) -> None:
        if version is None:
            version = 1 + await self.replicas[0].run(lambda engine: engine.weights.newest.version)
        in_flight = await self._unless_refused(in_flight)
        await asyncio.gather(
            *(
                replica.use_target(target, version=version, in_flight=in_flight)
                for replica in self.replicas
            )
        )

    async def use_drafter(self, drafter: Drafter, *, in_flight: InFlight = "refuse") -> None:
        in_flight = await self._unless_refused(in_flight)
        await asyncio.gather(
            *(replica.use_drafter(drafter, in_flight=in_flight) for replica in self.replicas)
        )

    async def _unless_refused(self, in_flight: InFlight) -> InFlight:
        """How the weights of every replica change, so that not only some of them do. Raises
        RuntimeError for ``refuse`` while requests are under way; those that come now end first."""
        for replica in self.replicas:
            is_idle = await replica.run(lambda engine: engine.is_idle)
            rule_for(in_flight, replica.llm.params, is_idle=is_idle)
        return "finish" if in_flight == "refuse" else in_flight

    async def tokenize(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The token ids of each prompt, see LLM.tokenize."""
        return await self.replicas[0].tokenize(prompts)

    async def events(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        timeout: float | None,
        options: TextOptions,
        streams: bool,
    ) -> AsyncGenerator[TextChunk | Completion, None]:
        async with self._placed(prompts, sampling) as parts:
            parallel = [part.events(timeout, options, streams) for part in parts]
            completions: dict[int, Completion] = {}
            ended = [iter(part.requests) for part in parts]
            async with contextlib.aclosing(_merged(parallel)) as events:
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
            for prompt, params in zip(tokens, each_sampling, strict=True):
                share = self.balancer.place(
                    prompt,
                    int(params.max_tokens),
                    requests=params.num_samples,
                    namespace=params.cache_salt,
                )
                part = parts.setdefault(share.engine, _Part(self.replicas[share.engine]))
                part.add(share, prompt, params, first)
                first += params.num_samples
            yield list(parts.values())
        finally:
            for part in parts.values():
                for share in part.shares:
                    self.balancer.end(share, part.works)


@dataclasses.dataclass
class _Part:
    """What one replica does of a call.

    Attributes:
      requests: the place in the call of each request; a prompt has one for each sample.
      works: whether a text of it was done, or the replica has failed; None: neither.
    """

    replica: AsyncLLM
    shares: list[Share] = dataclasses.field(default_factory=list)
    prompts: list[list[int]] = dataclasses.field(default_factory=list)
    sampling: list[SamplingParams] = dataclasses.field(default_factory=list)
    requests: list[int] = dataclasses.field(default_factory=list)
    works: bool | None = None

    def add(self, share: Share, prompt: list[int], params: SamplingParams, first: int) -> None:
        self.shares.append(share)
        self.prompts.append(prompt)
        self.sampling.append(params)
        self.requests += range(first, first + params.num_samples)

    async def events(
        self, timeout: float | None, options: TextOptions, streams: bool
    ) -> AsyncGenerator[TextChunk | Completion, None]:
        events = self.replica.events(self.prompts, self.sampling, timeout, options, streams)
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    if isinstance(event, Completion):  # all have ended then
                        self._see(event)
                    yield event
        except (ValueError, QueueFull):  # of the request
            raise
        except Exception:
            self.works = False
            raise

    def _see(self, completion: Completion) -> None:
        if completion.error_kind is ErrorKind.INTERRUPTED:
            self.works = False
        elif self.works is None and completion.finish_reason in WHOLE:
            self.works = True


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
        for task in tasks:
            task.cancel()
        await asyncio.gather(reading, *tasks, return_exceptions=True)
