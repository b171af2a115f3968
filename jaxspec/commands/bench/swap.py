"""Time replacing a target's weights in a running engine, as RL and distillation loops do.

All weights are random, of a public shape, and on the device. The first and the second `use_target`
are timed, with a jaxspec Decoder and with a flax parameter tree; the latter is transposed and
concatenated first. The command fails if a program is compiled again.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxspec import Engine, EngineParams, SamplingParams, SpeculationConfig
from jaxspec.checkpoints.flax_bridge import target_from_flax
from jaxspec.checkpoints.load import resolve_dtype
from jaxspec.commands.shared.shell import command_parser, run_command
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.decoding.drafters import NGramDrafter
from jaxspec.evaluation.benchmarks.random_params import random_decoder
from jaxspec.evaluation.benchmarks.shapes import SHAPES
from jaxspec.models.decoder import Decoder
from jaxspec.models.tensors import splitting, tensor_shapes
from pallas_kernels.selection import Kernels

PROMPT, SAMPLING = [1, 2, 3, 4], SamplingParams(max_tokens=16)


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("bench swap", __doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b", help="model shape")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="dtype of weights "
        "(default: float32 on CPU, else bfloat16)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def flax_tree(like: Decoder) -> tuple[dict[str, Any], dict[str, str]]:
    """A random flax tree for a target's shapes, and the names of its arrays."""
    splits = like.mapped(splitting(like.config.vocab_size))
    leaves = zip(jax.tree.leaves(like), jax.tree.leaves(splits), strict=True)
    tree: dict[str, Any] = {}
    names: dict[str, str] = {}
    for index, (name, tensor) in enumerate(tensor_shapes(leaves).items()):
        shape = tensor.shape
        is_kernel = name.endswith("proj.weight") or name == "lm_head.weight"
        path = name.replace("weight", "kernel") if is_kernel else name
        names[name], array_shape = path, shape[::-1] if is_kernel else shape
        noise = jax.random.normal(jax.random.key(index, impl="rbg"), array_shape, like.dtype)
        tree[path] = 1 + 0.1 * noise if len(array_shape) == 1 else noise * array_shape[0] ** -0.5
    return tree, names


def measure(args: argparse.Namespace) -> dict[str, Any]:
    dtype = resolve_dtype(args.dtype)
    config = SHAPES[args.shape]
    first, second = (random_decoder(config, dtype, None, seed) for seed in (0, 1))
    params = EngineParams(
        target=first,
        drafter=NGramDrafter(),
        speculation=SpeculationConfig.chain(3),
        kernels=Kernels.for_device(),
    )
    engine = Engine(params, CacheConfig(page_size=64, max_length=256), EngineConfig(max_rows=1))
    texts = [generate(engine)]
    programs: list[Any] = [
        getattr(engine.programs, name) for name in ("admit_rows", "prefill", "decode")
    ]
    traces = [program._cache_size() for program in programs]
    swaps = [functools.partial(engine.use_target, target) for target in (second, first)]
    seconds = {"Decoder": [timed(swap, engine) for swap in swaps]}
    del first, second, params, swaps  # frees memory: only the engine's weights are needed now
    tree, names = flax_tree(engine.params.target)
    jax.block_until_ready(tree)

    def use_flax() -> None:
        engine.use_target(target_from_flax(engine.params.target, tree, names))

    seconds["flax tree"] = [timed(use_flax, engine) for _ in range(2)]
    texts.append(generate(engine))
    if texts[0] == texts[1]:
        raise RuntimeError("the new weights were not used")
    if [program._cache_size() for program in programs] != traces:
        raise RuntimeError("a program was compiled again")
    return {
        "device": jax.devices()[0].device_kind,
        "shape": args.shape,
        "dtype": dtype.name,
        "seconds": seconds,
    }


def generate(engine: Engine) -> list[int]:
    generation = engine.add(PROMPT, SAMPLING)
    engine.finish([generation])
    return generation.token_ids


def timed(swap: Callable[[], None], engine: Engine) -> float:
    started = time.perf_counter()
    swap()
    jax.block_until_ready(engine.params.target)
    return time.perf_counter() - started


def run(args: argparse.Namespace) -> None:
    results = measure(args)
    if args.json:
        print(json.dumps(results))
        return
    print(f"{results['shape']}, {results['dtype']}, {results['device']}")
    for kind, (first, second) in results["seconds"].items():
        print(
            f"weights from a {kind} tree: {first:.3f} s the first time, {second:.3f} s the second"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments, expected=(ValueError, RuntimeError))
