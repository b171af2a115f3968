"""Compiles what a race runs: the programs of all its batches, before anything is timed."""

from collections.abc import Sequence

from jaxspec.config.sampling_params import SamplingParams, with_distinct_seeds
from jaxspec.config.speculation import PLAIN
from jaxspec.engine.engine import Engine
from jaxspec.engine.programs.sizes import ReadKey, RoundsKey
from jaxspec.engine.warm_up.compile_all import Progress, batch_keys
from jaxspec.engine.warm_up.compile_early import compile_program, compiling_threads
from jaxspec.llm.llm import LLM

Batch = Sequence[Sequence[int]]


def prepare_race(
    engines: Sequence[LLM],
    batches: Sequence[Batch],
    sampling: SamplingParams,
    on_progress: Progress = lambda done, of: None,
) -> None:
    """Compile what batches of one size run, side by side, and run the longest once.

    As in a server that has warmed up, the programs are few, and the engines use them from now on
    for all that fits: rounds have the page table of the longest request, and prompts are read one
    by one.

    Nothing runs while programs are compiled: on a GPU, XLA times matrix products meanwhile.
    """
    jobs = []
    for engine in (llm.engine for llm in engines):
        engine.programs.sealed = False  # else programs for larger batches would do
        keys = (*_rounds(engine, batches, sampling), *_reads(engine, batches, sampling))
        jobs += [(engine.programs, key) for key in keys if key not in engine.programs.ready]
    with compiling_threads() as pool:
        compiled = pool.map(lambda job: compile_program(*job), jobs)
        for done, _ in enumerate(compiled, 1):
            on_progress(done, len(jobs))
    for programs, key in jobs:
        if isinstance(key, ReadKey):
            programs.prepare_reading(key)
        else:
            programs.prepare_rounds(key)
    longest = max(batches, key=lambda batch: max(map(len, batch)))
    for engine in engines:
        engine.engine.programs.sealed = True
        engine.generate(longest, with_distinct_seeds(sampling, len(longest)))


def _rounds(engine: Engine, batches: Sequence[Batch], sampling: SamplingParams) -> list[RoundsKey]:
    """With the trees that warm-up compiles: of an engine that adapts, with none too."""
    longest = max(len(prompt) for batch in batches for prompt in batch)
    keys = batch_keys(engine.programs, [longest] * len(batches[0]), sampling)
    rounds = [key for key in keys if isinstance(key, RoundsKey)]
    if _is_crowd(engine, batches):
        return [key._replace(shape=PLAIN, undrafted=True) for key in rounds]
    shapes = engine.shapes.compiled_ahead(None)
    return [key._replace(shape=shape) for key in rounds for shape in shapes]


def _is_crowd(engine: Engine, batches: Sequence[Batch]) -> bool:
    """Whether these requests are so many that the drafter is left out."""
    return engine.shapes.crowds.is_crowd(len(batches[0]))


def _reads(engine: Engine, batches: Sequence[Batch], sampling: SamplingParams) -> list[ReadKey]:
    """For prompts of all lengths: a program may be twice as wide as one of them needs, on
    accelerators, where a few more tokens hardly take longer, four times."""
    devices = engine.programs.params.target.embed.devices()
    widest = 2 if next(iter(devices)).platform == "cpu" else 4
    lengths = {len(prompt) for batch in batches for prompt in batch}
    kept: list[ReadKey] = []
    for length in sorted(lengths, reverse=True):
        for key in batch_keys(engine.programs, [length], sampling):
            if isinstance(key, ReadKey) and all(each.width > widest * key.width for each in kept):
                kept.append(key._replace(columns=max(each.columns for each in (key, *kept))))
    return [key._replace(undrafted=_is_crowd(engine, batches)) for key in kept]
