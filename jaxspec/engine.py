"""From token prompts to generated tokens: host plans into arrays, compiled programs, results back.

The one module of the serving path that calls ``jax.jit``, so that donation and the number of
traces can be seen in one place.
"""

import dataclasses
import gc
import weakref
from collections.abc import Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import functional, memory
from jaxspec.cache import pages_for
from jaxspec.config import CacheConfig, TreeShape
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder
from jaxspec.sampling import make_sampling
from jaxspec.scheduling.batching import BatchPlan, plan_batch, split_requests
from jaxspec.scheduling.requests import SamplingParams, check_count, check_requests
from jaxspec.speculation.drafters import Drafter
from jaxspec.state import Emitted, EngineState, Pool
from pallas_kernels.selection import Kernels

MOST_PROGRAMS = 64
ProgramKey = tuple[object, ...]


class Engine:
    """Runs batches of token prompts; keeps the compiled programs, and one pool of cache memory.

    Each shape of batch, each kind of sampling and each tree shape has programs of its own. Beyond
    ``max_programs`` of them, or when the process runs out of memory maps (a program compiled for a
    CPU holds hundreds, and Linux allows 65,530), all are forgotten, and compiled again as they are
    needed: a process may live as long as it likes. Engines of one process share their programs.

    Args:
      params: as made by load.
      cache: geometry of the paged cache; ``max_length`` bounds every request.
      max_rows: most requests that run together.
      rounds_per_call: rounds between two looks at the results.
      max_programs: most compiled programs that are kept. A batch uses at least three, and a few
        more where its prompts are long and of different lengths.
    """

    def __init__(
        self,
        params: EngineParams,
        cache: CacheConfig | None = None,
        *,
        max_rows: int = 16,
        rounds_per_call: int = 32,
        max_programs: int = MOST_PROGRAMS,
    ):
        check_count("max_rows", max_rows)
        check_count("rounds_per_call", rounds_per_call)
        check_count("max_programs", max_programs)
        # Committed to their devices, as swapped weights are: else the first swap would recompile.
        self.params = jax.tree.map(_committed, params)
        self.cache = CacheConfig() if cache is None else cache
        self.max_rows = max_rows
        self.rounds_per_call = rounds_per_call
        self.max_programs = max_programs
        choices = ("greedy", "logprobs", "hidden")
        self.admit = jax.jit(functional.admit, donate_argnums=1)
        self.prefill = jax.jit(
            functional.prefill, donate_argnums=1, static_argnames=("width", *choices)
        )
        self.decode = jax.jit(
            functional.decode,
            donate_argnums=1,
            static_argnames=("max_rounds", "shape", *choices),
        )
        self._pool: Pool | None = None  # while no batch is under way
        self._owner: weakref.ref[object] | None = None  # of the pool, while one is
        self._ready: set[ProgramKey] = set()
        self._seeds = np.random.default_rng()

    @property
    def kernels(self) -> Kernels:
        """The operations that run as kernels."""
        return self.params.kernels

    def plan(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
    ) -> BatchPlan:
        """A batch of requests; those without a seed get one of their own.

        Raises ValueError for requests that could not run, or more than ``max_rows`` of them.
        """
        self.check(prompts, sampling)
        if len(prompts) > self.max_rows:
            raise ValueError(
                f"{len(prompts)} requests cannot run together: this engine has {self.max_rows} rows"
            )
        seeds = self._seeds.integers(2**32, size=len(prompts))
        seeded = [
            params if params.seed is not None else dataclasses.replace(params, seed=int(seed))
            for params, seed in zip(sampling, seeds, strict=True)
        ]
        return plan_batch(
            prompts,
            seeded,
            self.cache,
            model_stops=self.params.target.config.stop_token_ids,
            scratch_slots=self.params.speculation.scratch_slots,
            data_parallel=self.params.data_parallel,
        )

    def check(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> None:
        """Raise ValueError for requests that could not run."""
        config = self.params.target.config
        limits = config.vocab_size, self.cache.max_length, config.max_position
        check_requests(prompts, sampling, *limits)

    def batches(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
    ) -> list[slice]:
        """The requests as batches that run one after the other, in order: as many together as there
        are rows and pages for.

        Raises ValueError for requests that would not fit even alone.
        """
        self.check(prompts, sampling)
        return split_requests(
            prompts,
            sampling,
            self.cache,
            max_rows=self.max_rows,
            scratch_slots=self.params.speculation.scratch_slots,
            data_parallel=self.params.data_parallel,
        )

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        return params.stops(self.params.target.config.stop_token_ids)

    def begin(self, plan: BatchPlan, owner: object) -> EngineState:
        """A state that has admitted a batch, with the engine's pool in it.

        Raises RuntimeError while another batch is under way.
        """
        self._check_free()
        state = self._admitted(plan, self._take_pool(plan))
        self._owner = weakref.ref(owner)
        return state

    def _check_free(self) -> None:
        if self._owner is not None and self._owner() is not None:
            gc.collect()  # a batch that nobody holds any more may only wait for the collector
        if self._owner is not None and self._owner() is not None:
            raise RuntimeError(
                "another batch is under way on this engine: iterate it to its end, or call its "
                "abort(), first"
            )
        self._owner = None

    def _admitted(self, plan: BatchPlan, pool: Pool) -> EngineState:
        params = self.params
        state = functional.init_rows(
            params, pool, plan.num_rows, plan.length, max_stops=plan.stop_token_ids.shape[1]
        )
        # Committed to its device as the programs' results are: else each would compile twice.
        if params.mesh is None:
            state = jax.device_put(state, params.target.embed.sharding)
        self._make_room({("admit", *_program_key(state, plan))})
        prompts, prompt_lens = plan.padded_prompts()
        max_lens, stops = plan.padded_limits()
        sampling = make_sampling(
            plan.num_rows,
            temperature=plan.values("temperature"),
            top_k=plan.values("top_k", np.int32),
            top_p=plan.values("top_p"),
            min_p=plan.values("min_p"),
            seeds=plan.values("seed", np.uint32),
        )
        return self.admit(
            params,
            state,
            plan.rows,
            prompts,
            prompt_lens,
            sampling=sampling,
            max_lens=max_lens,
            stop_token_ids=stops,
        )

    def end(self, state: EngineState) -> None:
        """Take the pool back from a batch that is over, or given up.

        A call that was interrupted may have taken the state's arrays with it: the next batch then
        makes a pool anew.
        """
        lost = any(leaf.is_deleted() for leaf in jax.tree.leaves(state.pool))
        self._pool, self._owner = None if lost else state.pool, None

    def _take_pool(self, plan: BatchPlan) -> Pool:
        """The pool, if the batch fits it, else a larger one: memory is taken as batches need it.

        A larger pool compiles its programs anew. CacheConfig.num_pages makes all of it at once.
        Raises ValueError, before anything is allocated, for one that the device has no room for.
        """
        pool, self._pool = self._pool, None
        shards, slots = self.params.data_parallel, self.params.speculation.scratch_slots
        needed = plan.num_rows * pages_for(plan.length + slots, self.cache.page_size)
        # Of each device, with its null page.
        pages = -(-(self.cache.num_pages or needed) // shards) + 1
        if pool is not None:
            if pool.num_rows >= plan.num_rows and pool.num_pages >= shards * pages:
                return pool
            pages = max(pages, pool.num_pages // shards)
        rows = max(plan.num_rows, pool.num_rows if pool is not None else 0)
        del pool  # before there is another one
        return self._new_pool(shards * pages, rows)

    def _new_pool(self, num_pages: int, num_rows: int) -> Pool:
        sizes = num_pages, self.cache.page_size, num_rows
        memory.check_pool(self.params, *sizes)
        return functional.init_pool(self.params, *sizes)

    def _make_room(self, keys: Set[ProgramKey]) -> Set[ProgramKey]:
        """The keys of programs that are not compiled yet. All programs are cleared first if there
        would be too many."""
        new = keys - self._ready
        if new and (len(self._ready | new) > self.max_programs or memory.maps_are_scarce()):
            programs: tuple[Any, ...] = self.admit, self.prefill, self.decode
            for program in programs:
                program.clear_cache()
            self._ready.clear()
        self._ready |= new
        return new

    def prepare_reading(self, state: EngineState, plan: BatchPlan) -> EngineState:
        """Compile the programs that read a batch's prompts, by running them on nothing."""
        lists: dict[ProgramKey, np.ndarray | None] = {}  # one of each size to read
        for rows in map(plan.chunk_rows, range(plan.num_chunks)):
            lists[_reading_key(state, plan, rows)] = rows
        for key in self._make_room(lists.keys()):
            state, _ = self.read_chunk(state, plan, lists[key], most=0)
        return jax.block_until_ready(state)

    def prepare_rounds(
        self, state: EngineState, plan: BatchPlan, shape: TreeShape | None
    ) -> EngineState:
        """Compile the program of a batch's rounds, by running it on nothing."""
        if self._make_room({self._rounds_key(state, plan, shape)}):
            state, _ = self.run_rounds(state, plan, 0, shape)
        return jax.block_until_ready(state)

    def read_chunk(
        self, state: EngineState, plan: BatchPlan, rows: np.ndarray | None, most: int | None = None
    ) -> tuple[EngineState, Emitted]:
        """Read the next chunk of the prompts of some rows (see BatchPlan.chunk_rows), at most
        ``most`` tokens of each."""
        self._make_room({_reading_key(state, plan, rows)})
        size = plan.num_rows if rows is None else len(rows)
        counts = np.full(size, plan.chunk if most is None else most, np.int32)
        return self.prefill(self.params, state, rows, counts, width=plan.chunk, greedy=plan.greedy)

    def run_rounds(
        self, state: EngineState, plan: BatchPlan, rounds: int, shape: TreeShape | None
    ) -> tuple[EngineState, Emitted]:
        """Start up to ``rounds`` rounds, without waiting for them."""
        self._make_room({self._rounds_key(state, plan, shape)})
        return self.decode(
            self.params,
            state,
            np.int32(rounds),
            max_rounds=self.rounds_per_call,
            shape=self._shape(shape),
            greedy=plan.greedy,
        )

    def _shape(self, shape: TreeShape | None) -> TreeShape:
        """The normalized shape, for a program's key."""
        return self.params.call(shape).speculation.shape

    def _rounds_key(
        self, state: EngineState, plan: BatchPlan, shape: TreeShape | None
    ) -> ProgramKey:
        return "rounds", self._shape(shape), *_program_key(state, plan)

    def use_target(self, target: Decoder) -> None:
        """From the next batch on, generate with other weights of the same shapes.

        Nothing is compiled again, and nothing passes through the host where the weights are on the
        devices. They are not copied there: a caller must not donate them while they serve.

        Raises ValueError for weights of other shapes or choices, and RuntimeError while a batch is
        under way.
        """
        self._check_free()
        self.params = self.params.replace(target=_in_place_of(self.params.target, target))

    def use_drafter(self, drafter: Drafter) -> None:
        """As use_target, for the drafter."""
        self._check_free()
        self.params = self.params.replace(drafter=_in_place_of(self.params.drafter, drafter))


def _reading_key(state: EngineState, plan: BatchPlan, rows: np.ndarray | None) -> ProgramKey:
    size = 0 if rows is None else len(rows)
    return "read", size, plan.chunk, *_program_key(state, plan)


def _program_key(state: EngineState, plan: BatchPlan) -> ProgramKey:
    """What a batch's programs are compiled for, beside what is the engine's own."""
    stops = state.rows.stop_tokens.shape
    return plan.num_rows, plan.length, plan.greedy, stops, state.pool.num_pages


def _committed(leaf: Any) -> jax.Array:
    array = jnp.asarray(leaf)
    return jax.device_put(array, array.sharding)


def _in_place_of(current: Any, new: Any) -> Any:
    """``new`` where ``current`` lies, if their structure and shapes are the same."""
    if _shapes(new) != _shapes(current):
        raise ValueError(
            "the weights have other shapes or choices than those in use: make a new engine with "
            "them instead"
        )
    return jax.device_put(new, jax.tree.map(lambda leaf: leaf.sharding, current))


def _shapes(tree: Any) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]
