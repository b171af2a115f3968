"""AsyncEngine: streams of tokens for asyncio, from an engine that runs in a thread of its own."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from typing import Self

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.decoding.drafters import Drafter
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import FinishReason, Generation
from jaxspec.engine.weights.in_flight import InFlight
from jaxspec.models.decoder import Decoder

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """New tokens of one request.

    Attributes:
      token_ids: tokens since the last chunk; the last chunk may have none.
      generation: the request; its statistics and timings are complete when ``done``.
      done: whether this is the last chunk. Only then ``finish_reason`` is set.
      error: what went wrong, if the finish_reason is ``error``.
      index: of the request, among those of generate_all.
      restarts: of the request so far; where there is one more than in the chunk before, nothing
        that came before counts. Not of requests that stream.
    """

    token_ids: list[int]
    generation: Generation
    done: bool = False
    finish_reason: FinishReason | None = None
    error: str | None = None
    index: int = 0
    restarts: int = 0


class AsyncEngine:
    """Streams what an engine generates for many requests at once.

    >>> async with AsyncEngine(engine) as serving:
    ...     async for chunk in serving.generate(prompt, SamplingParams()):
    ...         print(chunk.token_ids)

    The engine belongs to this object's thread from now on; ``run`` is the way to reach it. The
    thread steps while there is something to do, and sleeps otherwise. Close the object, or the
    engine's memory stays in use. What the engine would warn of is logged.

    Args:
      most_rounds: most rounds of a call. Fewer give shorter and more frequent chunks, and let new
        requests begin sooner. None: the engine's own limit.
      on_chunk: called in the thread with every chunk, also of requests that nobody reads any more.

    Attributes:
      failures: steps that ended with an error, and all requests with them.
    """

    def __init__(
        self,
        engine: Engine,
        most_rounds: int | None = None,
        on_chunk: Callable[[Chunk], None] | None = None,
    ):
        self.failures, self._paused = 0, False
        self._engine, self._most_rounds, self._on_chunk = engine, most_rounds, on_chunk
        engine.watch.on_warning = logger.warning
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._requests: dict[str, _Request] = {}  # by request id; used by the thread alone
        self._changes: list[Future[None]] = []  # of weights; used by the thread alone
        self._lock = threading.Lock()  # so that no job comes after the one that ends the thread
        self._closed = False
        # A daemon: a program that forgets to close it still ends.
        self._thread = threading.Thread(target=self._work, name="jaxspec engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        timeout: float | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Chunks of a request's tokens; see Engine.add for the arguments.

        When the task is cancelled, or the generator closed, the request is cancelled: its pages are
        free in the next plan. An error of the engine ends it with the finish_reason ``error``.

        Raises ValueError for a request that could not run, QueueFull if too many wait, and
        RuntimeError if the engine is closed.
        """
        if sampling.stop:
            raise ValueError(
                "stop strings need the text, and this engine gives tokens: use AsyncLLM"
            )
        if sampling.num_samples > 1:
            raise ValueError("generate gives one sample: use generate_all for n or best_of above 1")
        async with contextlib.aclosing(
            self.generate_all([prompt], [sampling], timeout=timeout)
        ) as chunks:
            async for chunk in chunks:
                yield chunk

    async def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        *,
        timeout: float | None = None,
        streams: bool = True,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Chunks of several requests, as they come; all are queued, or none (see Engine.add_all).

        Each prompt gives as many requests as it has samples, one after the other. Stop strings are
        left to the caller, who may end a request early with ``end``. Ends as ``generate`` does, for
        all of them.

        Args:
          streams: False: chunks may be taken back, see Chunk.restarts.
          drafts: see Engine.add_all.
        """
        stream = _Stream(asyncio.get_running_loop())

        def add(engine: Engine) -> None:
            added = engine.add_all(
                prompts, sampling, timeout=timeout, streams=streams, drafts=drafts
            )
            stream.requests = [
                _Request(generation, stream, index) for index, generation in enumerate(added)
            ]
            self._requests |= {
                request.generation.request_id: request for request in stream.requests
            }

        left: int | None = None
        try:
            await self.run(add)
            left = len(stream.requests)
            while left:
                chunk = await stream.chunks.get()
                left -= chunk.done
                yield chunk
        finally:
            if left != 0:  # also if we were cancelled while ``add`` was waiting for the thread
                self._post(lambda: self._cancel(stream))

    def end(self, chunk: Chunk, reason: FinishReason = "stop") -> None:
        """End the request of a chunk soon; its last chunk follows. Does nothing if it has ended, or
        begun again since that chunk."""

        def end() -> None:
            if chunk.generation.restarts == chunk.restarts:
                self._engine.cancel(chunk.generation, reason)

        self._post(end)

    async def use_target(
        self, target: Decoder, *, version: int | None = None, in_flight: InFlight = "refuse"
    ) -> None:
        """See Engine.use_target; requests of ``generate`` stream. Returns like change_weights."""
        change = functools.partial(
            Engine.use_target, target=target, version=version, in_flight=in_flight
        )
        await self.change_weights(change)

    async def use_drafter(self, drafter: Drafter, *, in_flight: InFlight = "refuse") -> None:
        """The same for a drafter, see Engine.use_drafter."""
        await self.change_weights(
            functools.partial(Engine.use_drafter, drafter=drafter, in_flight=in_flight)
        )

    async def change_weights(self, change: Callable[[Engine], None]) -> None:
        """Call what gives the engine other weights, between two steps. Returns when these are in
        use, or others that were given later; a pause holds it up, unless no request is under way.

        Raises as ``run`` does.
        """
        changed: Future[None] = Future()

        def begin(engine: Engine) -> None:
            change(engine)
            self._changes.append(changed)

        await self.run(begin)
        await asyncio.shield(asyncio.wrap_future(changed))

    async def run[T](self, function: Callable[[Engine], T]) -> T:
        """The result of a function of the engine, called in its thread between two steps.

        Raises what the function raises, and RuntimeError if the engine is closed.
        """
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(function(self._engine))
            except Exception as error:
                future.set_exception(error)

        if not self._post(job):
            raise RuntimeError("the AsyncEngine is closed: make another one")
        # Shielded: the job runs even if nobody waits for it any more.
        return await asyncio.shield(asyncio.wrap_future(future))

    async def pause(self, paused: bool = True) -> None:
        """Let all requests, and those that come, stay as they are until it is called with False."""

        def keep(engine: Engine) -> None:
            self._paused = paused

        await self.run(keep)

    def abort_all(self) -> None:
        """End all requests soon, with what they have."""

        def abort() -> None:
            for request in self._requests.values():
                self._engine.cancel(request.generation, "abort")

        self._post(abort)

    async def close(self) -> None:
        """Cancel what is under way, and end the thread. May be called more than once."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _post(self, job: Callable[[], None]) -> bool:
        """Let the thread do something; False if it has ended, or is about to."""
        with self._lock:
            if not self._closed:
                self._jobs.put(job)
            return not self._closed

    # What the thread does.

    def _work(self) -> None:
        while True:
            for job in self._waiting_jobs():
                if job is None:
                    self._end()
                    return
                job()
            self._step()
            self._hand_out()
            self._tell_of_changes()

    def _waiting_jobs(self) -> list[Callable[[], None] | None]:
        """All that there are now. Sleeps for one if there is nothing else to do."""
        jobs = [self._jobs.get()] if self._paused or not self._engine.has_work else []
        while not self._jobs.empty():  # only this thread takes from it
            jobs.append(self._jobs.get())
        return jobs

    def _step(self) -> None:
        try:
            if self._engine.has_work and not self._paused:
                self._engine.step(self._most_rounds)
        except Exception:  # the engine has ended its requests with it, and starts anew
            self.failures += 1
            logger.exception("a step of the engine failed")

    def _cancel(self, stream: "_Stream") -> None:
        for request in stream.requests:  # none: ``add`` was refused
            self._engine.cancel(request.generation)

    def _hand_out(self) -> None:
        """Pass on what is new: one wake-up of each event loop."""
        new: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Chunk]]] = {}
        for request in list(self._requests.values()):
            chunk = request.next_chunk()
            if chunk is not None:
                new.setdefault(request.stream.loop, []).append((request.stream, chunk))
                if chunk.done:
                    del self._requests[chunk.generation.request_id]
                if self._on_chunk is not None:
                    self._on_chunk(chunk)
        for loop, chunks in new.items():
            try:
                loop.call_soon_threadsafe(_put_all, chunks)
            except RuntimeError:  # the loop is closed: nobody reads these any more
                for stream, _ in chunks:
                    self._cancel(stream)

    def _end(self) -> None:
        self._paused = False
        for request in self._requests.values():
            self._engine.cancel(request.generation)
        while self._engine.has_work:
            self._step()
        self._hand_out()
        self._tell_of_changes()

    def _tell_of_changes(self) -> None:
        """Tell those who wait for weights that these are in use."""
        if self._engine.weights.pending is None:
            for changed in self._changes:
                changed.set_result(None)
            self._changes.clear()


class _Stream:
    """The way to a reader, and the requests whose chunks it gets."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        self.requests: list[_Request] = []


class _Request:
    """A request, and how much of it its reader has."""

    def __init__(self, generation: Generation, stream: _Stream, index: int):
        self.generation, self.stream, self.index = generation, stream, index
        self._seen, self._restarts = 0, 0  # tokens, and times that it began again

    def next_chunk(self) -> Chunk | None:
        """What is new since the last one; None: nothing."""
        generation = self.generation
        if generation.restarts > self._restarts:
            self._seen, self._restarts = 0, generation.restarts
        ids = generation.token_ids[self._seen :]
        if not (ids or generation.done):
            return None
        self._seen += len(ids)
        reason, error = generation.finish_reason, generation.error
        return Chunk(ids, generation, generation.done, reason, error, self.index, self._restarts)


def _put_all(chunks: list[tuple[_Stream, Chunk]]) -> None:
    for stream, chunk in chunks:
        stream.chunks.put_nowait(chunk)
