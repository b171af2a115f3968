"""Compiles what requests need by running such ones."""

import dataclasses

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.engine.engine import Engine


def compile_by_running(
    engine: Engine, requests: int, prompt_tokens: int, sampling: SamplingParams
) -> None:
    """Compile the programs of so many requests that begin together, by running such ones.

    Raises ValueError for requests that could not run.
    """
    vocab = engine.params.target.config.vocab_size
    salted = [dataclasses.replace(sampling, cache_salt=f"prepare {i}") for i in range(requests)]
    generations = [engine.add([i % vocab] * prompt_tokens, s) for i, s in enumerate(salted)]
    try:
        while not all(len(each.token_ids) > 1 or each.done for each in generations):
            engine.step(1)
    finally:
        for generation in generations:
            engine.cancel(generation)
    while engine.has_work:
        engine.step()
    engine.watch.restart(engine.params.drafter)
