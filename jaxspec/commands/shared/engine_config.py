"""From the options of engine_options.py to an engine's configuration."""

import argparse
import dataclasses

from jaxspec.checkpoints.built_in import is_built_in
from jaxspec.config.engine import EngineConfig
from jaxspec.config.speculation import SpeculationConfig, default_speculation
from pallas_kernels.selection import default_device


def engine_config(arguments: argparse.Namespace, max_rows: int, *, plain: bool) -> EngineConfig:
    """The engine config of a command with add_mode_options. Raises ValueError for bad values.

    Args:
      plain: there is no drafter, and so no tree to choose.
    """
    return EngineConfig(
        max_rows=max_rows,
        prefix_caching=not arguments.no_prefix_cache,
        deterministic=arguments.deterministic,
        adaptive=arguments.adaptive and not plain,
    )


def with_memory(config: EngineConfig, arguments: argparse.Namespace) -> EngineConfig:
    """A config with the values of add_memory_options. Raises ValueError for bad values."""
    return dataclasses.replace(
        config,
        preemption=arguments.preemption,
        swap_memory=arguments.swap_memory,
        snapshot_memory=arguments.snapshot_memory,
    )


def speculation_config(arguments: argparse.Namespace) -> SpeculationConfig:
    """The tree that add_tree_options asks for. Raises ValueError for bad values."""
    if arguments.tree is None:
        tree = default_speculation(
            default_device().platform,
            built_in=is_built_in(arguments.model, arguments.drafter),
            acceptance=arguments.acceptance,
            verify_width=arguments.verify_width,
        )
    else:
        tree = SpeculationConfig.parse(arguments.tree)
    return dataclasses.replace(
        tree,
        acceptance=arguments.acceptance,
        proposal=arguments.proposal,
        verify_width=arguments.verify_width,
    )
