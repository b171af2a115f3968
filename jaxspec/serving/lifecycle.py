"""From the start of a server to its end: loading beside the event loop, signals, draining."""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxspec.llm.async_llm import AsyncLLM
from jaxspec.llm.replicas import ReplicatedLLM
from jaxspec.serving.draining import drain
from jaxspec.serving.endpoint import Endpoint
from jaxspec.serving.service import Service

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LAST_SECONDS = 1  # for connections that are not closed after all requests have ended
HEADER_SECONDS = 30.0  # until a connection has sent the head of a request
LOADING = "jaxspec loading"  # the name of the thread that loads


class Connection(H11Protocol):
    """uvicorn's, which ends when no request comes: half-open connections are not kept for ever."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watching()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Server(uvicorn.Server):
    """uvicorn's server, whose signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: FastAPI, endpoint: Endpoint | None = None) -> uvicorn.Server:
    """uvicorn's, whose signals are left to the caller, and who must drain it before it ends."""
    endpoint = Endpoint() if endpoint is None else endpoint
    app.root_path = endpoint.root_path  # uvicorn's own needs a proxy that cuts the prefix off
    options = uvicorn.Config(
        app,
        ssl_certfile=endpoint.certificate,
        ssl_keyfile=endpoint.key,
        http=Connection,
        log_config=None,  # uvicorn's own closes all handlers that the process has
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=LAST_SECONDS,
        lifespan="off",
    )
    return _Server(options)


async def serve(
    app: FastAPI,
    service: Service,
    load: Callable[[], AsyncLLM | ReplicatedLLM],
    *,
    endpoint: Endpoint,
    drain_seconds: int,
    on_ready: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT, then until what is under way has ended; a second one ends it.

    The port is open from the beginning: `/health` says 503 until the model is loaded. It stays open
    until the last request has ended: new ones get 503 after the signal, see draining.

    Args:
      load: called in a thread of its own.
      endpoint: where to listen.
      drain_seconds: from the signal until the last request ends.
      on_ready: called with the address once requests are served.

    Raises what ``load`` raises, and OSError for an address that cannot be listened at.
    """
    server, signalled = make_server(app, endpoint), asyncio.Event()
    _end_on_signals(server, service, signalled)
    draining = asyncio.create_task(_drain(server, service, signalled, drain_seconds))
    listening = endpoint.listen()
    url = endpoint.url(listening)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    loading = _in_a_thread(load)
    try:
        await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            service.start(loading.result())
            if not signalled.is_set():
                on_ready(url)
        await serving
    finally:
        server.should_exit = True
        draining.cancel()
        await asyncio.gather(serving, draining, return_exceptions=True)
        await service.close()
        endpoint.close()


def _in_a_thread[T](function: Callable[[], T]) -> asyncio.Future[T]:
    """The result of a function that runs in a thread.

    The thread is a daemon: the process may end before it has.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(set_it: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(lambda: None if future.done() else set_it())

    def work() -> None:
        try:
            result = function()
        except Exception as raised:
            error = raised
            tell(lambda: future.set_exception(error))
        else:
            tell(lambda: future.set_result(result))

    threading.Thread(target=work, name=LOADING, daemon=True).start()
    return future


def end_if_loading() -> None:
    """End the process with status 0, if its model is still loading.

    Python ends the threads that are left when it ends. Inside of XLA, which may be compiling, that
    is a crash.
    """
    if any(thread.name == LOADING for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


async def _drain(
    server: uvicorn.Server, service: Service, signalled: asyncio.Event, seconds: int
) -> None:
    await signalled.wait()
    await drain(service, seconds)
    server.should_exit = True


def _end_on_signals(server: uvicorn.Server, service: Service, signalled: asyncio.Event) -> None:
    def end() -> None:
        if signalled.is_set():  # the second time
            service.cut.set()
            server.force_exit = server.should_exit = True
        signalled.set()

    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, end)
