"""The field ``system_fingerprint``: answers with the same were made by the same configuration."""

import hashlib

from jaxspec._version import __version__
from jaxspec.decoding.functional import EngineParams


def fingerprint(name: str, params: EngineParams, weight_version: str | None) -> str:
    """A hash of the model's name and configuration, its dtype, the drafter's kind and tree, and the
    versions of jaxspec and of the weights: the same in every process that serves alike."""
    parts = (
        *(__version__, name, params.target.config, params.target.dtype),
        *(params.speculation, params.drafter_name, weight_version),
    )
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()
    return f"fp_{digest[:16]}"
