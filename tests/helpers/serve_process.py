"""`jaxspec serve` in a process of its own."""

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
READY = re.compile(r"serving .* at (http://127\.0\.0\.1:\d+)/v1")


@dataclasses.dataclass
class ServeProcess:
    """A process that serves at ``address``, without a slash at its end."""

    process: subprocess.Popen[str]
    address: str

    def metric(self, name: str) -> float:
        """The sum of a metric's series."""
        lines = httpx.get(f"{self.address}/metrics", timeout=60).text.splitlines()
        found = [line for line in lines if line.startswith(f"jaxspec:{name}{{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)


@contextlib.contextmanager
def serve_process(*options: str, devices: int = 1) -> Iterator[ServeProcess]:
    """A server with these options on simulated devices. It is ready, and killed at the end.

    Raises RuntimeError with what it wrote if it ends instead.
    """
    command = [sys.executable, "-m", "jaxspec", "serve", "--port", "0", *options]
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            shown = ""
            for line in process.stderr:
                shown += line
                sys.stderr.write(line)
                if found := READY.search(line):
                    break
            else:
                raise RuntimeError(f"the server did not start:\n{shown}")
            # What it writes later is passed on, so that it never waits for a reader.
            rest = threading.Thread(target=_pass_on, args=(process.stderr,), daemon=True)
            rest.start()
            yield ServeProcess(process, found[1])
        finally:
            process.kill()
            process.wait()


def _pass_on(lines: Iterator[str]) -> None:
    for line in lines:
        sys.stderr.write(line)
