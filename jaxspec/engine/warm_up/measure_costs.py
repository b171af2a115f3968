"""Measures what rounds, reading and swapping cost, through the very programs that serve.

They run on rows of random prompts, at a typical length.
"""

import dataclasses
import statistics
import time
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from jaxspec.config.cache import pages_for
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import TreeShape
from jaxspec.engine.plans.host_copies import measure_swapping
from jaxspec.engine.programs.arguments import NewRow
from jaxspec.engine.programs.programs import Programs
from jaxspec.engine.programs.sizes import SMALLEST_CHUNK, Kind, Load
from jaxspec.engine.programs.structured import no_masks, run_draft, run_verify
from jaxspec.engine.warm_up.compile_all import Coverage
from jaxspec.scheduling.preemption_costs import PreemptionCosts
from jaxspec.scheduling.round_costs import RoundCosts

CONTEXT = 512  # tokens of a row when its rounds are measured, if so many fit
MEASURED_ROUNDS = 8  # of a call that is measured
MEASURED_CALLS = 3  # the fastest counts


def measure_rounds(programs: Programs, cover: Coverage) -> RoundCosts:
    """Costs by rows (of each shard) and shape, through programs that are ready.

    Sizes for which there are too few pages are left out, but for the smallest. The rows must be
    empty, and are so afterwards. What the pages held is overwritten.
    """
    bench = _Bench(programs, cover)
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


def measure_preemption(programs: Programs, cover: Coverage, costs: PreemptionCosts) -> None:
    """Add what reading a prompt takes, and what moving pages to host memory and back takes.

    For rows and pages the same holds as for measure_rounds.
    """
    bench = _Bench(programs, cover)
    if bench.filled:
        costs.add_reading(*bench.reading())
    programs.release(range(programs.sizes.num_rows))
    measure_swapping(programs, costs, row=0)


class _Bench:
    """Rows with random prompts, which are read once and then found in their pages.

    They run in programs that are ready: where all requests are structured, in those for masks,
    which then restrict nothing.

    Attributes:
      share: rows of a shard; ``filled``: those of them that the pages suffice for.
    """

    def __init__(self, programs: Programs, cover: Coverage):
        self.programs, self.budget = programs, cover.budget
        self.kind, self.masked = min(
            cover.rounds, key=lambda program: (program[1], _distance(program[0]))
        )
        self.reads = min(cover.reads, key=lambda program: (program[1], program[0]))
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
        temperature = float(self.kind is not Kind.GREEDY)
        self.sampling = SamplingParams(temperature=temperature, seed=0)
        self.load = Load(tokens=self.length, kind=min(self.kind, Kind.SAMPLED))

    def _rows(self, count: int) -> list[int]:
        """The first rows of each shard."""
        return [s * self.share + row for s in range(self.programs.shards) for row in range(count)]

    def _admit(self, rows: Iterable[int], cached: int) -> None:
        new = []
        for row in rows:
            first = 1 + row % self.share * self.pages
            pages, prompt = range(first, first + self.pages), self.prompts[row].tolist()
            sampling = dataclasses.replace(self.sampling, seed=row)
            new.append(NewRow(row, prompt, self.length, sampling, (), len(prompt), pages, cached))
        self.programs.admit(new)

    def _read(self, rows: Sequence[int], count: int) -> None:
        reads, (kind, masked) = [(row, count, self.length) for row in rows], self.reads
        every = self.programs.all_tokens()
        masks = {row: every for row in rows if masked}
        self.programs.read(reads, self.load, masks, kind=kind)

    def read_prompts(self) -> None:
        """Fill the pages, a few rows at a time."""
        rows, context = self._rows(self.filled), self.prompts.shape[1]
        self._admit(rows, cached=0)
        together = max(1, self.budget // self.programs.sizes.max_chunk)
        for start in range(0, len(rows), together):
            self._read(rows[start : start + together], context)

    def reading(self) -> tuple[int, float]:
        """Tokens of a prompt, and seconds to read it: the fastest of a few times."""
        programs, timed = self.programs, []
        for _ in range(1 + MEASURED_CALLS):
            self._admit([0], cached=0)
            jax.block_until_ready(programs.state)
            started = time.perf_counter()
            self._read([0], self.prompts.shape[1])
            jax.block_until_ready(programs.state)
            timed.append(time.perf_counter() - started)
        return self.prompts.shape[1], min(timed)

    def seconds(self, size: int, shape: TreeShape) -> tuple[float, float]:
        """The seconds of a round, and of a call besides its rounds."""
        rows, context = self._rows(min(size, self.share)), self.prompts.shape[1]
        most = (self.length - context - 1) // (shape.max_depth + 1)
        rounds = max(2, min(most, MEASURED_ROUNDS, self.programs.sizes.max_rounds))
        (_, single), (ran, many) = (self._call(rows, shape, count) for count in (1, rounds))
        further = (many - single) / (ran - 1) if ran > 1 else many
        seconds = max(further, 0.5 * many / ran)  # noise must not make a round cost nothing
        return seconds, max(0.0, single - seconds)

    def _call(self, rows: Sequence[int], shape: TreeShape, rounds: int) -> tuple[int, float]:
        """Rounds that a call ran, and its seconds: the fastest of a few, all from the prompts."""
        programs, timed = self.programs, []
        for _ in range(MEASURED_CALLS):
            self._admit(rows, cached=self.prompts.shape[1])
            self._read(rows, 1)
            jax.block_until_ready(programs.state)
            started = time.perf_counter()
            ran = self._run(rows, shape, rounds)  # waits
            timed.append((time.perf_counter() - started, ran))
        seconds, ran = min(timed)
        return max(1, ran), seconds

    def _run(self, rows: Sequence[int], shape: TreeShape, rounds: int) -> int:
        """The rounds that were run."""
        programs = self.programs
        options = {"load": self.load, "shape": shape, "kind": self.kind}
        if not self.masked:
            calls = programs.run_rounds(rows, self.length, rounds, **options)
            return sum(int(call.emitted.num_rounds) for call in calls)
        for _ in range(rounds):
            drafted = run_draft(programs, rows, self.length, **options)
            jax.device_get(drafted.tree.tokens)  # as for the masks
            run_verify(programs, drafted, no_masks(programs, drafted))
        jax.block_until_ready(programs.state)
        return rounds


def _distance(kind: Kind) -> int:
    """Programs that sample are typical; those with controls cost more."""
    return abs(kind - Kind.SAMPLED)
