"""One of several processes with a tiny random model.

    python -m tests.helpers.process_worker PORT N I TEXTS REQUESTS

Process 0 prints the tokens of the first REQUESTS requests as JSON, TEXTS times; 0: without end.
"""

import itertools
import json
import sys

import jax

from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.engine.engine import Engine
from jaxspec.engine.programs.programs import Programs
from jaxspec.engine.programs.several_processes import FollowingPrograms, MakePrograms, make_programs
from jaxspec.parallel import make_mesh
from jaxspec.parallel.processes import Processes, ProcessGroup
from tests.helpers.layouts import on_mesh
from tests.helpers.random_models import make_params

PROMPTS = [[3, 4, 5], list(range(1, 20))]
SAMPLING = [
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=12, temperature=0.8, seed=2, presence_penalty=0.7),
]


def new_engine(devices: int = 1, make: MakePrograms = Programs) -> Engine:
    params = make_params("eagle3", SpeculationConfig.chain(2))
    if devices > 1:
        params = on_mesh(params, make_mesh(devices), shard_drafter=False)
    # Few pages, so that one request waits for the pages of the other.
    cache = CacheConfig(page_size=8, max_length=48, num_pages=6)
    config = EngineConfig(max_rows=2, rounds_per_call=4)
    return Engine(params, cache, config, make_programs=make)


def tokens(engine: Engine, requests: int) -> list[list[int]]:
    generations = engine.add_all(PROMPTS[:requests], SAMPLING[:requests])
    engine.finish(generations)
    return [generation.token_ids for generation in generations]


def main(port: str, size: str, index: str, texts: str, requests: str) -> None:
    jax.config.update("jax_disable_most_optimizations", True)
    group = ProcessGroup(f"localhost:{port}", int(size), int(index))
    with Processes(group) as processes:
        engine = new_engine(group.size, make_programs(processes))
        if isinstance(engine.programs, FollowingPrograms):
            engine.programs.follow()
            return
        for _ in range(int(texts)) if int(texts) else itertools.count():
            print(json.dumps(tokens(engine, int(requests))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
