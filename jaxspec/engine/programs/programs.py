"""The compiled programs of an engine, and the device state that they work on.

For serving only this module and, for pipelines, the folder pipeline/ call ``jax.jit``.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.cache import ModelState
from jaxspec.config.speculation import TreeShape
from jaxspec.decoding import functional
from jaxspec.decoding.functional import EngineParams, SavedRow
from jaxspec.decoding.functional.constrained import draft_rows, verify_rows
from jaxspec.decoding.functional.decode import decode_rows
from jaxspec.decoding.functional.prefill import read_rows
from jaxspec.decoding.functional.verified_chunks import verify_chunk
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.sampling import Controls
from jaxspec.decoding.state import Emitted, EngineState
from jaxspec.engine.programs.arguments import (
    NewRow,
    admission,
    empty_state,
    new_controls,
    program_options,
)
from jaxspec.engine.programs.call import LaunchedCall, to_host
from jaxspec.engine.programs.compiled import CompiledPrograms
from jaxspec.engine.programs.pipeline.use import PipelineUse
from jaxspec.engine.programs.sizes import (
    Kind,
    Load,
    ReadKey,
    Reads,
    RoundsKey,
    Sizes,
    VerifyKey,
    choose_reading,
    choose_rounds,
    groups_of_reads,
    in_parts,
    page_list,
    widest,
)
from jaxspec.engine.programs.undrafted import run_as
from jaxspec.engine.programs.weights import program_weights
from jaxspec.engine.programs.xla_options import compiler_options
from jaxspec.engine.structured.matcher import ALL_TOKENS
from jaxspec.parallel import named_shardings

ADMITTING = {"may_wait": True, "checked": False}  # the scheduler knows its tokens and rows
ADMISSIONS, MANY_ADMISSIONS = 4, 32  # rows that a program admits: one for a few, one for many

Masks = Mapping[int, np.ndarray]  # by row: uint32 [W]
Readings = Iterator[tuple[ReadKey, Reads]]  # the program of each call, and what it reads


class Programs(CompiledPrograms):
    """Admits, reads, decodes: each method launches programs and does not wait for them.

    Attributes:
      compiles_early: whether other threads may compile them before they run; ``compiles_beside``:
        also while others run.
      pipeline: how busy the stages of a pipeline were.
    """

    compiles_early = compiles_beside = True
    pipeline: PipelineUse | None = None

    def __init__(self, params: EngineParams, sizes: Sizes, max_programs: int):
        super().__init__(max_programs, sizes.page_size)
        self.params, self.sizes = program_weights(params), sizes
        fixed = params.speculation.verify_width is not None  # in deterministic mode, too
        xla = functools.partial(compiler_options, params.target.embed, deterministic=fixed)
        jit = functools.partial(jax.jit, donate_argnums=1, compiler_options=xla())
        run = functools.partial(jit, static_argnums=2)  # of (params, state, RoundOptions, ...)
        self.admit_rows = jit(functional.admit, static_argnames=("may_wait", "checked"))
        self.prefill = run(read_rows, compiler_options=xla(reads=True))
        self.decode, self.draft, self.verify = run(decode_rows), run(draft_rows), run(verify_rows)
        self._options: dict[ReadKey | RoundsKey | VerifyKey, RoundOptions] = {}
        self.small: dict[str, Any] = {
            function.__name__: jit(function)
            for function in (
                functional.release,
                functional.resume,
                functional.catch_up,
                functional.copy_pages,
                functional.remember,
                functional.save_row,
                functional.restore_row,
                functional.take_states,
                functional.put_states,
                functional.set_controls,
            )
        }
        self.small["verify_chunk"] = run(verify_chunk, compiler_options=xla(reads=True))
        self.columns = sizes.columns
        self.tables = np.zeros((sizes.num_rows, self.columns), np.int32)
        self.state = self._new_state()
        self._controls: Controls | None = None
        self._rows_with_controls: set[int] = set()

    @property
    def shards(self) -> int:
        return self.params.data_parallel

    def _new_state(self) -> EngineState:
        return self._placed(empty_state, self.sizes)

    def _placed[T, S](self, make: Callable[[EngineParams, S], T], size: S) -> T:
        """What ``make`` returns, placed as the results of programs are: else each program would
        compile twice."""
        mesh, place = self.params.mesh, self.params.target.embed.sharding
        if mesh is not None:
            shapes = jax.eval_shape(lambda: make(self.params, size))
            place = named_shardings(mesh, shapes, self.params.layout)
        # One program, not one for each array. Engines of equal shapes share it, as they do others.
        return jax.jit(make, static_argnums=1, out_shardings=place)(self.params, size)

    def use(self, params: EngineParams) -> None:
        """Run with other weights of the same shapes from now on."""
        self.params = program_weights(params)

    def reset(self) -> None:
        """Start from an empty state: a call that was interrupted may have taken the old one."""
        self.use(self.params)
        self.tables[:] = 0
        for array in jax.tree.leaves((self.state, self._controls)):
            array.delete()  # two pools would not fit
        self.state, self._controls = self._new_state(), None
        self._rows_with_controls.clear()

    # What rows hold.

    def admit(self, rows: Sequence[NewRow]) -> None:
        """Assign requests to rows."""
        size = ADMISSIONS if len(rows) <= ADMISSIONS else MANY_ADMISSIONS
        if ("admit", size) not in self.ready and ("admit", MANY_ADMISSIONS) in self.ready:
            size = MANY_ADMISSIONS
        for start in range(0, len(rows), size):
            self._admit(rows[start : start + size], size)

    def _admit(self, rows: Sequence[NewRow], size: int) -> None:
        arguments, options = admission(rows, size, self.sizes, self.columns)
        for new, table in zip(rows, options["page_table"], strict=False):
            self.tables[new.row] = table
        with self.counted(("admit", size)):
            options = ADMITTING | options
            self.state = self.admit_rows(self.params, self.state, *arguments, **options)

    def set_controls(self, rows: Sequence[NewRow]) -> None:
        """Give rows the bias and penalties of their requests."""
        # A row without any need not be told so, unless its last request had some.
        changed = [new for new in rows if new.has_controls or new.row in self._rows_with_controls]
        for part in itertools.batched(changed, ADMISSIONS):
            arguments = new_controls(part, ADMISSIONS, self.sizes, self.params)
            with self.controlled(Kind.FULL):
                self._small("set_controls", *arguments)
        self._rows_with_controls -= {new.row for new in changed}
        self._rows_with_controls |= {new.row for new in changed if new.has_controls}

    def assign_pages(self, tables: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Give rows other page tables. No program does it: the tables are replaced as they are."""
        if not tables:
            return
        for row, table in tables:
            self.tables[row] = page_list(table, self.columns)
        held = np.cumprod(self.tables > 0, axis=1).sum(axis=1) * self.sizes.page_size
        capacity = (held - self.params.speculation.scratch_slots).astype(np.int32)
        # A copy: the transfer may still read it when the host's tables change again.
        self.replace_tables(self.tables.copy(), capacity)

    def replace_tables(self, tables: np.ndarray, capacity: np.ndarray) -> None:
        """Give all rows these page tables, int32 [R, M], and context capacities, int32 [R]."""
        table, held = self.place_tables(tables, capacity)
        rows = self.state.rows.replace(page_table=table, context_capacity=held)
        self.state = self.state.replace(rows=rows)

    def place_tables(self, tables: np.ndarray, capacity: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """The arguments of replace_tables on the devices, split as the rows are."""
        rows = self.state.rows
        places = rows.page_table.sharding, rows.context_capacity.sharding
        return jax.device_put((tables, capacity), places)

    def release(self, rows: Sequence[int]) -> None:
        """Empty rows that are not done."""
        if rows:
            self._small("release", self.sizes.padded(rows, self.sizes.num_rows))

    def resume(self, rows: Sequence[NewRow]) -> None:
        """Let rows go on that a stop token has ended, with other stop tokens."""
        for part in itertools.batched(rows, ADMISSIONS):
            _, options = admission(part, ADMISSIONS, self.sizes, self.columns)
            listed = self.sizes.padded([new.row for new in part], ADMISSIONS)
            stops, temperature = options["stop_token_ids"], options["sampling"].temperature
            self._small("resume", listed, stops, temperature)

    def catch_up(self, rows: Sequence[int]) -> None:
        """Let the drafter read the last tokens of rows that are done."""
        if rows:
            size, most = self.sizes.size_for(rows), self.sizes.num_rows // self.shards
            if self.ask is not None:  # one program for a few rows, and one for many
                few = min(ADMISSIONS, most)
                size = few if size <= few else self.sizes.rows_for(most)
            self._small("catch_up", self.sizes.listed(rows, size))

    def copy_pages(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy pages: (shard, source, destination) each."""
        for start in range(0, len(copies), ADMISSIONS):
            lists = np.zeros((2, self.shards, ADMISSIONS), np.int32)
            for place, (shard, *pages) in enumerate(copies[start : start + ADMISSIONS]):
                lists[:, shard, place] = pages
            self._small("copy_pages", *lists.reshape(2, -1))

    def remember(self, tokens: np.ndarray, count: int) -> None:
        """Add the first ``count`` of ``tokens`` [n] to the drafter's past text."""
        self._small("remember", tokens, np.int32(count))

    def save(self, row: int, pages: Sequence[int]) -> SavedRow:
        """A row with the contents of pages, at most a part, on its way to host memory."""
        listed = page_list(pages, self.sizes.part_pages)
        return to_host(self._small("save_row", np.array([row], np.int32), listed))

    def restore(
        self, saved: SavedRow, row: int, pages: Sequence[int], table: Sequence[int]
    ) -> None:
        """Put a saved row back, with this table; its contents go to ``pages``, in order."""
        self.tables[row] = page_list(table, self.columns)
        listed = page_list(pages, self.sizes.part_pages)
        self._small("restore_row", saved, np.array([row], np.int32), listed, self.tables[[row]])

    def take_states(self, row: int) -> ModelState:
        """What a row keeps outside of pages, on its way to host memory."""
        return to_host(self._small("take_states", np.array([row], np.int32)))

    def put_states(self, saved: ModelState, row: int) -> None:
        """Give a row what take_states copied."""
        self._small("put_states", saved, np.array([row], np.int32))

    def _small(self, name: str, *arguments: Any) -> Any:
        shapes, saved = tuple(leaf.shape for leaf in jax.tree.leaves(arguments)), None
        with self.counted((name, shapes)):
            result = self.small[name](self.params, self.state, *arguments)
            self.state, saved = result if isinstance(result, tuple) else (result, None)
        return saved

    # Calls that run the model.

    def read(self, reads: Reads, load: Load, masks: Masks, *, kind: Kind) -> list[LaunchedCall]:
        """Read prompt tokens; ``masks`` are of rows whose first token is restricted."""
        return [self._read(*part, masks) for part in self.readings(reads, load, set(masks), kind)]

    def readings(self, reads: Reads, load: Load, masked_rows: set[int], kind: Kind) -> Readings:
        """The calls that read these tokens. Rows with masks are read with the drafter."""
        for (width, masked), group in groups_of_reads(reads, self.sizes, masked_rows):
            columns = self.sizes.columns_for(max(most for *_, most in group))
            wanted = ReadKey(0, columns, width, kind, masked, load.undrafted and not masked)
            most = widest(self.runnable(), wanted) if self.sealed else width
            for part in in_parts(group, most):
                yield from self._readings(part, wanted, load)

    def _readings(self, reads: Reads, wanted: ReadKey, load: Load) -> Readings:
        """The calls that read these tokens, which are all masked or all not."""
        shards = self.sizes.by_shard([row for row, *_ in reads])
        longest = max(map(len, shards))
        width = self.sizes.width_for(max(count for _, count, _ in reads))
        key = self._read_key(wanted._replace(rows=longest, width=width), load)
        for start in range(0, longest, key.rows):
            part = {row for shard in shards for row in shard[start : start + key.rows]}
            yield key, [read for read in reads if read[0] in part]

    def can_read(self, reads: Reads, load: Load, masked_rows: set[int], kind: Kind) -> bool:
        """Whether these tokens are read together: by programs that are there, or that may be
        compiled while the calls wait."""
        if not self.sealed:
            return True
        return {key for key, _ in self.readings(reads, load, masked_rows, kind)} <= self.runnable()

    def _read_key(self, wanted: ReadKey, load: Load) -> ReadKey:
        columns = max(wanted.columns, self.sizes.columns_for(load.tokens))
        rows, kind = self.sizes.rows_for(wanted.rows), max(wanted.kind, load.kind)
        kind = self.sizes.kind_for(kind)
        target = wanted._replace(rows=rows, columns=columns, kind=kind)
        key = choose_reading(
            self.runnable(), wanted, target, sealed=self.sealed, read_call=self.sizes.read_call
        )
        return self.now(key)

    def _read(self, key: ReadKey, reads: Reads, masks: Masks) -> LaunchedCall:
        rows = self.sizes.listed([row for row, *_ in reads], key.rows)
        self.prepare_reading(key)
        tokens = {row: count for row, count, _ in reads}
        counts = np.array([tokens.get(int(row), 0) for row in rows], np.int32)
        return LaunchedCall.now(rows, self._prefill(key, rows, counts, masks))

    def _prefill(self, key: ReadKey, rows: np.ndarray, counts: np.ndarray, masks: Masks) -> Emitted:
        listed = [masks.get(int(row), self.all_tokens()) for row in rows]
        return self._run(self.prefill, key, rows, counts, np.stack(listed) if key.masked else None)

    def prepare_reading(self, key: ReadKey) -> None:
        """Compile a program, by running it on nothing, unless it is ready."""
        if not self.is_ready(key):
            rows = self.sizes.listed([], key.rows)
            with self.counted(key):
                self._prefill(key, rows, np.zeros(len(rows), np.int32), {})

    def run_rounds(
        self,
        rows: Sequence[int],
        tokens: int,
        rounds: int,
        load: Load,
        *,
        shape: TreeShape,
        kind: Kind,
    ) -> list[LaunchedCall]:
        """Run up to ``rounds`` rounds of some rows, each of which ends with at most ``tokens``."""
        calls, fixed = [], self.sizes.fixed_rounds
        while rounds > 0:
            count = fixed and (fixed if rounds >= fixed else 1)
            key = self.now(self.rounds_key(rows, tokens, load, shape, kind, rounds=count))
            self.prepare_rounds(key)
            listed = self.sizes.listed(rows, key.rows)
            emitted = self._run(self.decode, key, np.int32(rounds), listed)
            calls.append(LaunchedCall.now(listed, emitted))
            rounds -= count or rounds
        return calls

    def rounds_key(
        self,
        rows: Sequence[int],
        tokens: int,
        load: Load,
        shape: TreeShape,
        kind: Kind,
        *,
        masked: bool = False,
        rounds: int = 0,
    ) -> RoundsKey:
        """The program that runs rounds of these rows; see run_rounds."""
        size, columns = self.sizes.size_for(rows), self.sizes.columns_for(tokens)
        kind, undrafted = self.sizes.kind_for(kind), load.undrafted and not masked
        wanted = RoundsKey(size, columns, shape, kind, masked, rounds, undrafted)
        loaded = min(-(-load.rows // self.shards), self.sizes.num_rows // self.shards)
        target = wanted._replace(
            rows=size if masked else max(size, self.sizes.rows_for(loaded)),
            columns=max(wanted.columns, self.sizes.columns_for(load.tokens)),
            kind=max(wanted.kind, load.kind),
        )
        return choose_rounds(self.runnable(), wanted, target, sealed=self.sealed)

    def _run(self, program: Any, key: ReadKey | RoundsKey, *rest: Any) -> Emitted:
        with self.controlled(key.kind):
            first = self.params, self.state, self.options(key)
            self.state, emitted = run_as(key, program, *first, *rest)
        return emitted

    def options(self, key: ReadKey | RoundsKey | VerifyKey) -> RoundOptions:
        """The options of a program that reads prompts, verifies old texts or runs rounds."""
        if key not in self._options:
            self._options[key] = program_options(self.params, self.sizes, key)
        return self._options[key]

    def all_tokens(self) -> np.ndarray:
        """The mask that restricts nothing: uint32 [W]."""
        return np.full(-(-self.params.target.config.vocab_size // 32), ALL_TOKENS)

    def prepare_rounds(self, key: RoundsKey) -> None:
        """Compile a program, by running it on nothing, unless it is ready."""
        if not self.is_ready(key):
            with self.counted(key):
                self._run(self.decode, key, np.int32(0), self.sizes.listed([], key.rows))

    @contextlib.contextmanager
    def controlled(self, kind: Kind) -> Iterator[None]:
        """Around a program of this kind. If it applies controls, the state has them meanwhile.

        They stay out of the state otherwise, so other programs do not depend on them, and memory
        for them is taken when the first request needs it.
        """
        if not kind.controls:
            yield
            return
        if self._controls is None:
            self._controls = self._placed(functional.no_controls, self.sizes.num_rows)
        self.state = self.state.replace(controls=self._controls)
        yield
        self._controls, self.state = self.state.controls, self.state.replace(controls=None)

    def clear_caches(self) -> None:
        large: list[Any] = [self.admit_rows, self.prefill, self.decode, self.draft, self.verify]
        for program in (*large, *self.small.values()):
            program.clear_cache()
