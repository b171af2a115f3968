"""The one place where the host waits for what a plan's programs emit."""

from collections.abc import Collection
from typing import Any

import jax

from jaxspec.engine.programs.call import LaunchedCall


def wait_for_device(calls: Collection[LaunchedCall]) -> tuple[list[LaunchedCall], bool]:
    """Calls with what they emitted, read from the device, and whether the host had to wait.

    Of an engine whose requests are neither structured nor swapped, only this waits for the device,
    once its programs have run.
    """
    statuses: list[Any] = [call.emitted.status for call in calls]
    is_running = not all(status.is_ready() for status in statuses)
    return jax.device_get(list(calls)), is_running
