"""Several processes of one command, as add_process_options describes them."""

import argparse
import contextlib
import os
from collections.abc import Mapping

from jaxspec.parallel.processes import Processes, ProcessGroup


def process_group(
    arguments: argparse.Namespace, environment: Mapping[str, str]
) -> ProcessGroup | None:
    """None: this process alone. Raises ValueError for options that do not go together."""
    given = arguments.num_processes, arguments.process_id, arguments.local_devices
    if arguments.coordinator is None:
        if given != (None, None, None):
            raise ValueError(
                "--num-processes, --process-id and --local-devices are for several processes: add "
                "--coordinator"
            )
        return None
    if arguments.dp not in (None, 1):
        raise ValueError("--dp goes without --coordinator: several processes share one engine")
    if arguments.pp != 1 or arguments.drafter_devices:
        raise ValueError("a pipeline runs in one process: leave --coordinator out, or --pp")
    if arguments.sp != 1:
        raise ValueError("--sp goes without --coordinator: split the model over processes by --tp")
    return ProcessGroup(
        arguments.coordinator,
        _number(arguments.num_processes, "--num-processes", "SLURM_NTASKS", environment),
        _number(arguments.process_id, "--process-id", "SLURM_PROCID", environment),
        arguments.local_devices,
    )


def _number(given: int | None, option: str, variable: str, environment: Mapping[str, str]) -> int:
    text = environment.get(variable, "") if given is None else str(given)
    if not text.isdecimal():
        raise ValueError(f"--coordinator needs {option}, or ${variable} as srun sets it")
    return int(text)


def processes_of(
    arguments: argparse.Namespace,
) -> contextlib.AbstractContextManager[Processes | None]:
    """The processes that the options ask for, for all that the command does with jax."""
    group = process_group(arguments, os.environ)
    return contextlib.nullcontext() if group is None else Processes(group)
