"""What the records of a run say of the run itself."""

import datetime

import jax

from jaxspec.commands.shell import typed_command


def run_facts() -> dict[str, str]:
    """Date, command, jax version and device, for the records of a run."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": typed_command(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
