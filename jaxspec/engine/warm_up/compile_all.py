"""Compiles an engine's programs before the load comes: side by side, and then they run on nothing.

What they cost is measured by measure_costs.py.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence

import jax

from jaxspec.config.checks import check_count
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN, TreeShape
from jaxspec.engine.host_drafter import drafts_on_host
from jaxspec.engine.plans.past_outputs import PastOutputs
from jaxspec.engine.programs.arguments import empty_prompts
from jaxspec.engine.programs.programs import ADMISSIONS, Programs
from jaxspec.engine.programs.sizes import (
    SMALLEST_CHUNK,
    Kind,
    Load,
    ReadKey,
    RoundsKey,
    power_of_two,
)
from jaxspec.engine.programs.structured import prepare_program
from jaxspec.engine.warm_up.compile_early import compile_program, compiling_threads
from jaxspec.scheduling.plan import Limits

STEP = 4  # between the sizes of programs that read prompts

GREEDY_AND_SAMPLED = (SamplingParams(), SamplingParams(temperature=1.0))

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Coverage:
    """What programs are compiled for.

    Attributes:
      sizes: rows of programs of rounds, of each shard; powers of two.
      shapes: of their trees.
      tokens: most tokens of a request.
      budget: most prompt tokens that a plan reads.
      rounds, reads: kinds of programs, and whether the host masks their tokens; of rounds also
        whether it drafts.
      swaps: whether rows may be swapped to host memory.
      snapshots: whether states of rows may be copied to host memory.
      undrafted_rows: from which programs without a drafter serve all rows but those with masks, see
        Limits; None: never.
    """

    sizes: tuple[int, ...]
    shapes: tuple[TreeShape, ...]
    tokens: int
    budget: int
    rounds: tuple[tuple[Kind, bool], ...]
    reads: tuple[tuple[Kind, bool], ...]
    swaps: bool
    snapshots: bool
    undrafted_rows: int | None = None

    def trees(self, *, masked: bool) -> list[tuple[int, TreeShape, bool]]:
        """Rows and trees of programs of rounds, and whether they have no drafter."""
        crowd = None if masked else self.undrafted_rows
        few = self.drafted_sizes(crowd)
        drafted = [(rows, shape, False) for rows in few for shape in self.shapes]
        many = set(self.sizes) & set(steps(1, self.sizes[-1])) if crowd is not None else ()
        return drafted + [(rows, PLAIN, True) for rows in sorted(many)]

    def drafted_sizes(self, crowd: int | None) -> tuple[int, ...]:
        """Sizes of programs that hold fewer rows than a crowd."""
        enough = [rows for rows in self.sizes if crowd is not None and rows >= crowd - 1]
        return tuple(rows for rows in self.sizes if not enough or rows <= enough[0])


def coverage(
    programs: Programs,
    limits: Limits,
    shapes: tuple[TreeShape, ...],
    sampling: Sequence[SamplingParams],
    tokens: int | None,
    rows: Iterable[int] | None,
) -> Coverage:
    """What is compiled for requests sampled like these; see Engine.warm_up for the rest.

    Raises ValueError for bad sizes, and without sampling.
    """
    if not sampling:
        raise ValueError("sampling must name at least one way to sample")
    if tokens is not None:
        check_count("tokens", tokens)
    masked = [params.structured is not None for params in sampling]
    of = programs.sizes.kind_for
    rounds = {
        (of(Kind.of(params)), mask or drafts_on_host(programs.params, params))
        for params, mask in zip(sampling, masked, strict=True)
    }
    # Prompts of greedy requests are read by programs that could sample: one token of a row each.
    kinds = [max(Kind.of(params, reads=True), Kind.SAMPLED) for params in sampling]
    reads = set(zip(kinds, masked, strict=True))
    # Prompts of masked rows may be read beside those of any others.
    least = min((kind for kind, mask in reads if mask), default=None)
    reads |= {(kind, True) for kind in kinds if least is not None and kind >= least}
    return Coverage(
        sizes=_row_sizes(programs, rows),
        shapes=shapes,
        tokens=min(tokens or limits.max_length, limits.max_length),
        budget=limits.prefill_budget,
        rounds=tuple(sorted(rounds)),
        reads=tuple(sorted(reads)),
        swaps=limits.preemption != "recompute",
        snapshots=bool(limits.snapshots),
        undrafted_rows=limits.undrafted_rows,
    )


def _row_sizes(programs: Programs, wanted: Iterable[int] | None = None) -> tuple[int, ...]:
    """Powers of two; the largest is always one of them."""
    share, sizes = programs.sizes.num_rows // programs.shards, programs.sizes
    counts = [1 << exponent for exponent in range(share.bit_length())]
    if wanted is not None:
        counts = list(wanted)
        for rows in counts:
            check_count("rows", rows)
    return tuple(sorted({sizes.rows_for(min(share, rows)) for rows in (share, *counts)}))


def rounds_keys(programs: Programs, cover: Coverage) -> list[RoundsKey]:
    columns, fixed = programs.sizes.columns_for(cover.tokens), programs.sizes.fixed_rounds
    lengths = {1, fixed} if fixed else {0}
    return [
        RoundsKey(rows, columns, shape, kind, masked, rounds, undrafted)
        for kind, masked in cover.rounds
        for rows, shape, undrafted in cover.trees(masked=masked)
        for rounds in ({0} if masked else lengths)
    ]


def reading_keys(programs: Programs, cover: Coverage) -> list[ReadKey]:
    """Few sizes: a prompt may be read by a program that is larger than it needs."""
    columns = programs.sizes.columns_for(cover.tokens)
    sizes, few = programs.sizes, cover.drafted_sizes(cover.undrafted_rows)
    if sizes.fixed:
        rows, width = cover.sizes[-1], sizes.max_chunk
        return [ReadKey(rows, columns, width, kind, masked) for kind, masked in cover.reads]
    widths, shorter = steps(SMALLEST_CHUNK, sizes.width_for(cover.tokens)), 0
    keys = []
    for width in widths:
        most = min(cover.sizes[-1], power_of_two(max(1, cover.budget // (shorter + 1))))
        keys += [
            ReadKey(rows, columns, width, kind, masked)
            for kind, masked in cover.reads
            for rows in steps(1, min(most, few[-1]))
        ]
        keys += [
            ReadKey(rows, columns, width, kind, masked, undrafted=True)
            for kind, masked in cover.reads
            for rows in steps(1, most)
            if cover.undrafted_rows is not None and not masked
        ]
        shorter = width
    return keys


def batch_keys(
    programs: Programs, prompt_lens: Sequence[int], sampling: SamplingParams
) -> list[ReadKey | RoundsKey]:
    """Keys of the programs that run such requests if they begin together, in an engine that holds
    them all and reads their prompts at once, with its largest tree."""
    load, kind, fixed = Load(), Kind.of(sampling), programs.sizes.fixed_rounds
    for length in prompt_lens:
        load.add(len(prompt_lens), length + sampling.max_tokens, kind)
    reads = [(row, length, load.tokens) for row, length in enumerate(prompt_lens)]
    reading = programs.readings(reads, load, set(), Kind.of(sampling, reads=True))
    shape = programs.params.round_options().speculation.shape
    rows = range(len(prompt_lens))
    return [
        *(key for key, _ in reading),
        *(
            programs.rounds_key(rows, load.tokens, load, shape, kind, rounds=rounds)
            for rounds in ((1, fixed) if fixed > 1 else (fixed,))
        ),
    ]


def steps(first: int, last: int) -> list[int]:
    """From one power of two to another, each several times the one before."""
    return [*(first << shift for shift in range(0, 64, 2) if first << shift < last), last]


def compile_all(programs: Programs, cover: Coverage, on_progress: Progress | None = None) -> None:
    """Compile what serves such requests, so that nothing compiles while they are served.

    The rows must be empty. Raises ValueError if these are more programs than may be kept.
    """
    keys = [*reading_keys(programs, cover), *rounds_keys(programs, cover)]
    keys = [key for key in dict.fromkeys(keys) if key not in programs.ready]
    small = 7 + 2 * cover.snapshots + len(_row_sizes(programs))  # see compile_small
    small += programs.params.drafter.past_tokens > 0
    needed = len(programs.ready) + len(keys) + small
    if needed > programs.max_programs:
        raise ValueError(
            f"warm_up needs {needed} programs, and max_programs is {programs.max_programs}: raise "
            "it, or name fewer shapes, sizes of rows, or ways of sampling"
        )
    started = time.perf_counter()
    with compiling_threads() as pool:
        compiled = pool.map(functools.partial(compile_program, programs), keys)
        for done, _ in enumerate(compiled, 1):
            if on_progress is not None:
                on_progress(done, len(keys))
    programs.compile_seconds += time.perf_counter() - started
    for key in keys:
        prepare_program(programs, key)
    compile_small(programs, cover)
    programs.sealed = True


def compile_small(programs: Programs, cover: Coverage) -> None:
    """Compile what moves rows and pages, by running it on empty rows and the null page."""
    rows = range(programs.sizes.num_rows)
    for few in {1, min(len(rows), ADMISSIONS + 1)}:
        programs.admit(empty_prompts(rows[:few], SamplingParams()))
    if any(kind.controls for kind, _ in cover.rounds):
        for sampling in (SamplingParams(logit_bias={0: 1.0}), SamplingParams()):
            programs.set_controls(empty_prompts([0], sampling))
    if any(masked for _, masked in cover.rounds):
        programs.resume(empty_prompts([0], SamplingParams()))
    programs.release(rows)
    share = programs.sizes.num_rows // programs.shards
    for size in _row_sizes(programs):
        programs.catch_up(range(min(size, share)))
    programs.copy_pages([(0, 0, 0)])
    PastOutputs(programs).prepare()
    if cover.swaps:
        programs.restore(jax.device_get(programs.save(0, ())), 0, (), ())
    if cover.snapshots:
        programs.put_states(jax.device_get(programs.take_states(0)), 0)
