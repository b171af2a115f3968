"""Compiles an engine's programs before the load comes, and measures what a round costs.

Programs are compiled side by side, and then run on nothing. Rounds are measured through the very
programs that serve: on rows of random prompts, at a typical length.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from jaxspec.ahead import compile_program, compiling_threads
from jaxspec.cache import pages_for
from jaxspec.config.checks import check_count
from jaxspec.config.speculation import TreeShape
from jaxspec.masked_programs import prepare_masked
from jaxspec.new_rows import NewRow
from jaxspec.program_sizes import SMALLEST_CHUNK, Kind, Load, ReadKey, RoundsKey, power_of_two
from jaxspec.programs import Programs
from jaxspec.scheduling.adaptive import RoundCosts
from jaxspec.scheduling.plan import Limits
from jaxspec.scheduling.requests import SamplingParams

STEP = 4  # between the sizes of programs that read prompts
CONTEXT = 512  # tokens of a row when its rounds are measured, if it has room for them
MEASURED_ROUNDS = 8  # of a call that is measured
MEASURED_CALLS = 3  # the fastest counts

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
      rounds, reads: kinds of programs, and whether the host masks their tokens.
      swaps: whether rows may be swapped to host memory.
    """

    sizes: tuple[int, ...]
    shapes: tuple[TreeShape, ...]
    tokens: int
    budget: int
    rounds: tuple[tuple[Kind, bool], ...]
    reads: tuple[tuple[Kind, bool], ...]
    swaps: bool


def coverage(
    programs: Programs,
    limits: Limits,
    shapes: tuple[TreeShape, ...],
    sampling: Sequence[SamplingParams],
    tokens: int | None,
    rows: Iterable[int] | None,
) -> Coverage:
    """For requests sampled like these; the others are arguments of Engine.warm_up.

    Raises ValueError for bad sizes, and without sampling.
    """
    if not sampling:
        raise ValueError("sampling must name at least one way to sample")
    if tokens is not None:
        check_count("tokens", tokens)
    masked = [one.structured is not None for one in sampling]
    of = programs.sizes.kind_for
    rounds = {(of(Kind.of(one)), mask) for one, mask in zip(sampling, masked, strict=True)}
    # Prompts of greedy requests are read by programs that could sample: one token of a row each.
    kinds = [max(Kind.of(one, reads=True), Kind.SAMPLED) for one in sampling]
    return Coverage(
        sizes=_row_sizes(programs, rows),
        shapes=shapes,
        tokens=min(tokens or limits.max_length, limits.max_length),
        budget=limits.prefill_budget,
        rounds=tuple(sorted(rounds)),
        reads=tuple(sorted(set(zip(kinds, masked, strict=True)))),
        swaps=limits.preemption != "recompute",
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
        RoundsKey(rows, columns, shape, kind, masked, rounds)
        for kind, masked in cover.rounds
        for rows in cover.sizes
        for shape in cover.shapes
        for rounds in ({0} if masked else lengths)
    ]


def reading_keys(programs: Programs, cover: Coverage) -> list[ReadKey]:
    """Few sizes: a prompt may be read by a program that is larger than it needs."""
    columns = programs.sizes.columns_for(cover.tokens)
    sizes = programs.sizes
    if sizes.fixed:
        one = cover.sizes[-1], columns, sizes.max_chunk
        return [ReadKey(*one, kind, masked) for kind, masked in cover.reads]
    widths, shorter = steps(SMALLEST_CHUNK, sizes.width_for(cover.tokens)), 0
    keys = []
    for width in widths:
        most = min(cover.sizes[-1], power_of_two(max(1, cover.budget // (shorter + 1))))
        keys += [
            ReadKey(rows, columns, width, kind, masked)
            for kind, masked in cover.reads
            for rows in steps(1, most)
        ]
        shorter = width
    return keys


def steps(first: int, last: int) -> list[int]:
    """From one power of two to another, each several times the one before."""
    return [*(first << shift for shift in range(0, 64, 2) if first << shift < last), last]


def compile_all(programs: Programs, cover: Coverage, on_progress: Progress | None = None) -> None:
    """Compile what serves such requests, so that nothing compiles while they are served.

    The rows must be empty. Raises ValueError if these are more programs than may be kept.
    """
    keys = [*reading_keys(programs, cover), *rounds_keys(programs, cover)]
    keys = [key for key in dict.fromkeys(keys) if key not in programs.ready]
    small = 6 + len(_row_sizes(programs))  # see compile_small
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
        if isinstance(key, ReadKey):
            programs.prepare_reading(key)
        elif key.masked:
            prepare_masked(programs, key)
        else:
            programs.prepare_rounds(key)
    compile_small(programs, cover)
    programs.sealed = True


def compile_small(programs: Programs, cover: Coverage) -> None:
    """Compile what moves rows and pages, by running it on empty rows and the null page."""
    programs.admit([_new_row(0, (0,), 1, (), SamplingParams())])  # done at once: it has no pages
    if any(kind.controls for kind, _ in cover.rounds):
        for sampling in (SamplingParams(logit_bias={0: 1.0}), SamplingParams()):
            programs.set_controls([_new_row(0, (0,), 1, (), sampling)])
    programs.release([0])
    share = programs.sizes.num_rows // programs.shards
    for size in _row_sizes(programs):
        programs.settle(range(min(size, share)))
    programs.copy_pages([(0, 0, 0)])
    if cover.swaps:
        programs.restore(jax.device_get(programs.save(0, ())), 0, 0, ())


def _new_row(
    row: int,
    prompt: Sequence[int],
    max_len: int,
    table: Sequence[int],
    sampling: SamplingParams,
    cached: int = 0,
) -> NewRow:
    sampling = dataclasses.replace(sampling, seed=row)
    return NewRow(row, prompt, max_len, sampling, (), len(prompt), table, cached)


def measure_rounds(programs: Programs, cover: Coverage) -> RoundCosts:
    """Costs by rows (of each shard) and shape, through programs that are ready.

    Sizes for which there are too few pages are left out, but for the smallest. The rows must be
    empty, and are so afterwards. What the pages held is overwritten.
    """
    kind = max([kind for kind, _ in cover.rounds if kind <= Kind.SAMPLED], default=Kind.SAMPLED)
    bench = _Bench(programs, cover, kind)
    bench.read_prompts()
    measured = {
        (size, shape): bench.seconds(size, shape)
        for size in cover.sizes
        if min(size, bench.share) <= bench.filled or size == cover.sizes[0]
        for shape in cover.shapes
    }
    programs.release(range(programs.sizes.num_rows))
    rounds = {point: seconds for point, (seconds, _) in measured.items()}
    return RoundCosts(rounds, statistics.median(call for _, call in measured.values()))


class _Bench:
    """Rows with random prompts, which are read once and then found in their pages.

    Attributes:
      share: rows of a shard; ``filled``: those of them that the pages suffice for.
    """

    def __init__(self, programs: Programs, cover: Coverage, kind: Kind):
        self.programs, self.kind, self.budget = programs, kind, cover.budget
        sizes, params = programs.sizes, programs.params
        self.share = sizes.num_rows // programs.shards
        scratch = params.speculation.scratch_slots
        wanted = pages_for(min(cover.tokens, 2 * CONTEXT) + scratch, sizes.page_size)
        least = pages_for(min(cover.tokens, SMALLEST_CHUNK) + scratch, sizes.page_size)
        pages = sizes.num_pages // programs.shards - 1
        self.pages = min(wanted, max(least, pages // self.share))
        self.filled = min(self.share, pages // self.pages)
        self.length = min(cover.tokens, self.pages * sizes.page_size - scratch)
        shape = sizes.num_rows, max(1, min(CONTEXT, self.length // 2))
        vocab = params.target.config.vocab_size
        self.prompts = np.random.default_rng(0).integers(vocab, size=shape, dtype=np.int32)
        self.sampling = SamplingParams(temperature=float(kind is not Kind.GREEDY))
        self.load = Load(tokens=self.length, kind=kind)

    def _rows(self, count: int) -> list[int]:
        """The first rows of each shard."""
        return [s * self.share + row for s in range(self.programs.shards) for row in range(count)]

    def _admit(self, rows: Iterable[int], cached: int) -> None:
        new = []
        for row in rows:
            first = 1 + row % self.share * self.pages
            pages, prompt = range(first, first + self.pages), self.prompts[row].tolist()
            new.append(_new_row(row, prompt, self.length, pages, self.sampling, cached))
        self.programs.admit(new)

    def _read(self, rows: Sequence[int], count: int) -> None:
        reads = [(row, count, self.length) for row in rows]
        self.programs.read(reads, self.load, {}, kind=Kind.SAMPLED)

    def read_prompts(self) -> None:
        """Fill the pages, a few rows at a time."""
        rows, context = self._rows(self.filled), self.prompts.shape[1]
        self._admit(rows, cached=0)
        together = max(1, self.budget // self.programs.sizes.max_chunk)
        for start in range(0, len(rows), together):
            self._read(rows[start : start + together], context)

    def seconds(self, size: int, shape: TreeShape) -> tuple[float, float]:
        """Of a round, and of a call besides its rounds."""
        rows, context = self._rows(min(size, self.share)), self.prompts.shape[1]
        most = (self.length - context - 1) // (shape.max_depth + 1)
        rounds = max(2, min(most, MEASURED_ROUNDS, self.programs.sizes.max_rounds))
        (_, one), (ran, many) = (self._call(rows, shape, count) for count in (1, rounds))
        further = (many - one) / (ran - 1) if ran > 1 else many
        seconds = max(further, 0.5 * many / ran)  # noise must not make a round cost nothing
        return seconds, max(0.0, one - seconds)

    def _call(self, rows: Sequence[int], shape: TreeShape, rounds: int) -> tuple[int, float]:
        """Rounds that a call ran, and its seconds: the fastest of a few, all from the prompts."""
        programs, timed = self.programs, []
        for _ in range(MEASURED_CALLS):
            self._admit(rows, cached=self.prompts.shape[1])
            self._read(rows, 1)
            jax.block_until_ready(programs.state)
            started = time.perf_counter()
            calls = programs.run_rounds(
                rows, self.length, rounds, self.load, shape=shape, kind=self.kind
            )
            ran = sum(int(call.emitted.num_rounds) for call in calls)  # waits
            timed.append((time.perf_counter() - started, ran))
        seconds, ran = min(timed)
        return max(1, ran), seconds
