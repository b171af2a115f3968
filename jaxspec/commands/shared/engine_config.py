"""From the options of engine_options.py to an engine's configuration."""

import argparse
import dataclasses

from jax.sharding import Mesh

from jaxspec.checkpoints.built_in import is_built_in
from jaxspec.commands.shared.meshes import drafter_mesh
from jaxspec.config.engine import EngineConfig
from jaxspec.config.speculation import SpeculationConfig, default_speculation
from jaxspec.llm.options import LLMOptions
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
        adaptive=False if plain else arguments.adaptive,
    )


def with_memory(config: EngineConfig, arguments: argparse.Namespace) -> EngineConfig:
    """A config with the values of add_memory_options. Raises ValueError for bad values."""
    return dataclasses.replace(
        config,
        preemption=arguments.preemption,
        swap_memory=arguments.swap_memory,
        snapshot_memory=arguments.snapshot_memory,
    )


def asked_speculation(arguments: argparse.Namespace) -> SpeculationConfig | None:
    """What add_tree_options asks for; None: nothing, so the default tree is drafted, or a smaller
    one where that is faster. Raises ValueError for bad values."""
    options = arguments.tree, arguments.proposal, arguments.verify_width
    if arguments.acceptance == "match" and all(option is None for option in options):
        return None
    return speculation_config(arguments)


def speculation_config(arguments: argparse.Namespace) -> SpeculationConfig:
    """The tree of add_tree_options. Raises ValueError for bad values."""
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


def llm_options(arguments: argparse.Namespace, mesh: Mesh | None) -> LLMOptions:
    """What `jaxspec generate` and `jaxspec serve` load alike. Raises ValueError for bad values."""
    return LLMOptions(
        arguments.model,
        arguments.drafter,
        speculation=asked_speculation(arguments),
        dtype=arguments.dtype,
        mesh=mesh,
        shard_drafter=arguments.shard_drafter,
        drafter_bits=arguments.drafter_bits,
        kv_dtype=arguments.kv_dtype,
        kv_scales=arguments.kv_scales,
        kernels=arguments.kernels,
        stage_layers=arguments.stage_layers,
        drafter_mesh=drafter_mesh(arguments),
        page_size=arguments.page_size,
        max_length=arguments.max_length,
        num_pages=arguments.num_pages,
    )
