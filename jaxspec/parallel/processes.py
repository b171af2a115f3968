"""Several processes that share one model: they join, process 0 tells the others what to run, and
when one ends unexpectedly all end.

Each process runs the same programs over the devices of all. What process 0 tells goes over
connections of their own (``multiprocessing.connection``), beside the collectives of the devices.
"""

import dataclasses
import os
import queue
import secrets
import signal
import sys
import threading
import time
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all

BEAT_SECONDS = 2.0  # between two signs of life
SILENCE_SECONDS = 20.0  # after which a process counts as dead
JAX_SILENCE_SECONDS = 40  # the same for jax, whose message says less: only if ours does not come
LAST_SECONDS = 2.0  # for telling the others of an end
KEY_BYTES = 32

BEAT, SAY, END, FAIL = range(4)  # kinds of messages


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """Which processes there are.

    Attributes:
      coordinator: host and port where process 0 is reached, the same in all processes.
      size: number of processes, and ``index`` of this one.
      local_devices: numbers of the GPUs that this process takes; None: all that it sees.
    """

    coordinator: str
    size: int
    index: int
    local_devices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        host, colon, port = self.coordinator.rpartition(":")
        if not (colon and host and port.isdecimal()):
            raise ValueError(f"the coordinator must be HOST:PORT, got {self.coordinator!r}")
        if not 0 <= self.index < self.size:
            raise ValueError(f"of {self.size} processes there is no number {self.index}")

    @property
    def host(self) -> str:
        return self.coordinator.rpartition(":")[0]


class Processes:
    """The connections between process 0, which leads, and the others, which follow.

    To be used as a context, around all that the processes do together:

    >>> with Processes(ProcessGroup("localhost:5000", size=2, index=0)) as processes:
    ...     llm = LLM(mesh=make_mesh(jax.device_count()), processes=processes)
    ...     if not llm.follow():  # process 0
    ...         print(llm.generate(...))

    An exception that leaves the context ends all processes, with its message as one line on stderr
    and status 1. So does a process that dies or is silent for SILENCE_SECONDS.

    Must be made before anything uses a device. Raises ValueError if the processes do not meet.

    Attributes:
      group: which processes there are.
      leads: whether this is process 0.
    """

    def __init__(self, group: ProcessGroup):
        self.group, self.leads = group, group.index == 0
        self._claimed = self._ending = False
        self._sending = threading.Lock()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        _initialize(group)
        self._others = _connect(group, self.leads)
        for index, connection in self._others.items():
            threading.Thread(target=self._listen, args=(index, connection), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def claim(self) -> None:
        """For an engine. Raises ValueError if the processes have one already."""
        if self._claimed:
            raise ValueError("several processes share one engine: make only one")
        self._claimed = True

    def tell(self, message: Any) -> None:
        """Send a message to all that follow, in order. It must be picklable."""
        self._send(SAY, message)

    def next(self) -> Any:
        """Wait for the next message of process 0; None at the end."""
        kind, message = self._inbox.get()
        return message if kind == SAY else None

    def fail(self, reason: str) -> None:
        """End all processes, with one line on stderr each."""
        self._ending = True
        # In a thread: one that is stopped takes nothing, and sending to it does not return.
        telling = threading.Thread(target=self._send, args=(FAIL, reason), daemon=True)
        telling.start()
        telling.join(LAST_SECONDS)
        _leave(reason)

    def __enter__(self) -> "Processes":
        if not self.leads:  # it ends when process 0 does, which may have to finish something
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            text = " ".join(str(error).split()) or type(error).__name__
            self.fail(f"process {self.group.index} of {self.group.size}: {text}")
        if self.leads:
            self._ending = True
            self._send(END, None)
        if not self._claimed:  # the others may be waiting for this one, within jax
            _leave(None)
        jax.distributed.shutdown()  # waits for all
        self._ending = True

    def _send(self, kind: int, message: Any) -> None:
        lost = []
        with self._sending:
            for index, connection in self._others.items():
                try:
                    connection.send((kind, message))
                except OSError:
                    lost.append(index)
        if lost and not self._ending:
            self._lost(lost[0])

    def _beat(self) -> None:
        while not self._ending:
            self._send(BEAT, None)
            time.sleep(BEAT_SECONDS)

    def _listen(self, index: int, connection: Connection) -> None:
        """Take what another process sends, until the end."""
        while True:
            try:
                alive = connection.poll(SILENCE_SECONDS)
                kind, message = connection.recv() if alive else (None, None)
            except (OSError, EOFError):
                kind, message = None, None
            if self._ending:
                return
            if kind is None:
                self._lost(index)
            elif kind == FAIL:
                self.fail(str(message))  # the others are told, too
            elif kind == END:
                self._ending = True
                if not self._claimed:
                    _leave(None)
                self._inbox.put((END, None))
                return
            elif kind == SAY:
                self._inbox.put((SAY, message))

    def _lost(self, index: int) -> None:
        size = self.group.size
        self.fail(f"process {index} of {size} has died or cannot be reached: all processes end")


def _initialize(group: ProcessGroup) -> None:
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            group.coordinator,
            group.size,
            group.index,
            group.local_devices,
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=JAX_SILENCE_SECONDS,
            shutdown_timeout_seconds=int(SILENCE_SECONDS),
        )
    except RuntimeError as error:
        raise ValueError(
            f"{group.size} processes do not meet at {group.coordinator}: {error}"
        ) from error


def _connect(group: ProcessGroup, leads: bool) -> dict[int, Connection]:
    """Connections to the others by their number, or only to process 0. The port and the key are
    passed on by the devices."""
    key, port = np.zeros(KEY_BYTES, np.uint8), np.zeros((), np.int32)
    if not leads:
        key, port = broadcast_one_to_all((key, port))
        connection = Client((group.host, int(port)), authkey=key.tobytes())
        connection.send(group.index)
        return {0: connection}
    key = np.frombuffer(secrets.token_bytes(KEY_BYTES), np.uint8)
    with Listener((group.host, 0), backlog=group.size, authkey=key.tobytes()) as listener:
        broadcast_one_to_all((key, np.int32(listener.address[1])))
        accepted = [listener.accept() for _ in range(group.size - 1)]
    return {connection.recv(): connection for connection in accepted}


def _leave(reason: str | None) -> None:
    """End this process at once, whatever its threads wait for."""
    if reason is not None:
        print(f"jaxspec: {reason}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if reason is None else 1)
