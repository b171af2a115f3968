"""Compiles the programs of a shape with random weights, as a command's options say."""

import argparse

import jax.numpy as jnp
from rich.console import Console

from jaxspec.checkpoints.load import with_kv_dtype
from jaxspec.evaluation.benchmarks.modes import make_params, parse_mode
from jaxspec.evaluation.benchmarks.random_params import random_decoder, random_head
from jaxspec.evaluation.benchmarks.rounds import Bench, Workload
from jaxspec.evaluation.benchmarks.shapes import model_shape
from jaxspec.parallel import devices_of_model, replica_meshes
from pallas_kernels.selection import Kernels


def shape_bench(
    args: argparse.Namespace, rounds: int, progress: Console, chunk: int | None = None
) -> Bench:
    """The compiled programs of ``args.mode``, with random weights.

    Args:
      args: with the options of ``add_shape_options``, ``mode``, ``batch`` and ``dtype``.
      rounds: of a call; the state has slots for their tokens.
      chunk: most prompt tokens of a sequence in a call; None: as engines read them.

    Raises ValueError for what the shape cannot do.
    """
    [mesh] = replica_meshes(1, args.tp, args.sp)
    mode = parse_mode(args.mode)
    kernels = Kernels.parse(args.kernels, sharing=devices_of_model(mesh))
    config, dtype = model_shape(args.shape, args.layers), jnp.dtype(args.dtype)
    workload = Workload(
        batch=args.batch,
        context=args.context,
        rounds=rounds,
        page_size=args.page_size,
        repeats=1,
        chunk=chunk,
    )
    workload.check_fits(mode, config)
    progress.print(f"making random weights of {args.shape}")
    schemes = args.quantization, args.lm_head_quantization
    experts = args.expert_format
    target, head = random_decoder(config, dtype, mesh, 0, *schemes, experts), None
    if mode.speculation:
        scheme = args.drafter_quantization
        head = random_head(
            config,
            dtype,
            mesh,
            1,
            kind=args.draft_head,
            quantization=scheme,
            expert_format=experts,
        )
    params = with_kv_dtype(make_params(mode, target, head, mesh, kernels), args.kv_dtype)
    return Bench(mode, params, workload)
