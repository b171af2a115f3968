"""Compiles what a race runs: the programs of all its batches, before anything is timed."""

from collections.abc import Iterable, Sequence

from jaxspec.config.sampling_params import SamplingParams, with_distinct_seeds
from jaxspec.engine.programs.sizes import ReadKey, RoundsKey, choose_reading, choose_rounds
from jaxspec.engine.warm_up.compile_all import Progress, batch_keys
from jaxspec.engine.warm_up.compile_early import compile_program, compiling_threads
from jaxspec.llm.llm import LLM

Batch = Sequence[Sequence[int]]
Key = ReadKey | RoundsKey


def prepare_race(
    engines: Sequence[LLM],
    batches: Iterable[Batch],
    sampling: SamplingParams,
    on_progress: Progress = lambda done, of: None,
) -> None:
    """Compile what such batches run, and run those of them that need other programs.

    Programs are compiled side by side. Nothing runs meanwhile: on a GPU, XLA times matrix products
    while it compiles. Then batches run once, so that nothing is left to trace or to load.
    """
    jobs: list[tuple[LLM, Key]] = []
    warm_ups: list[Batch] = []
    kept: list[list[Key]] = [list(engine.engine.programs.ready) for engine in engines]
    # The longest first: their programs read shorter prompts, too.
    for batch in sorted(batches, key=lambda batch: max(map(len, batch)), reverse=True):
        found = [
            (engine, key)
            for engine, keys in zip(engines, kept, strict=True)
            for key in _added(engine, batch, sampling, keys)
        ]
        jobs += found
        if found:
            warm_ups.append(batch)
    with compiling_threads() as pool:
        compiled = pool.map(lambda job: compile_program(job[0].engine.programs, job[1]), jobs)
        for done, _ in enumerate(compiled, 1):
            on_progress(done, len(jobs))
    for batch in warm_ups:
        for engine in engines:
            engine.generate(batch, with_distinct_seeds(sampling, len(batch)))


def _added(llm: LLM, batch: Batch, sampling: SamplingParams, kept: list[Key]) -> list[Key]:
    """Keys of programs that the batch needs besides those that are kept; they are kept from now."""
    added: list[Key] = []
    for key in batch_keys(llm.engine.programs, list(map(len, batch)), sampling):
        if isinstance(key, ReadKey):
            chosen: Key = choose_reading([*kept, *added], key, key, sealed=False)
        else:
            chosen = choose_rounds([*kept, *added], key, key, sealed=False)
        if chosen not in kept and chosen not in added:
            added.append(chosen)
    kept += added
    return added
