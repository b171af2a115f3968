"""What an engine runs with: parameters, the sizes of its programs, limits of its scheduler.

**Deterministic mode:** in bfloat16, too, a request's text does not depend on what else is going on.

A matrix product of a fixed shape gives each row of its result the same value wherever the row
stands and whatever the other rows hold. So all calls have the same shapes (see
sizes.Sizes.fixed). Attention, whose shape follows the sequences, adds up in float64. The
compiler may neither choose kernels by timing them nor drop a rounding where it fuses (see
xla_options.py). What is shared or brought back is what the same program would compute: pages
that were read as a prompt are never exchanged for pages that were generated, and requests are
swapped, not recomputed.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.config.cache import CacheConfig, pages_for
from jaxspec.config.engine import EngineConfig
from jaxspec.config.speculation import PLAIN, default_verify_width
from jaxspec.decoding.choose_shape import expected_gain
from jaxspec.decoding.drafters.checks import check_drafter
from jaxspec.decoding.functional import EngineParams
from jaxspec.decoding.prior_costs import prior_costs
from jaxspec.engine import memory
from jaxspec.engine.plans.host_copies import part_bytes, snapshot_bytes
from jaxspec.engine.programs.sizes import SMALLEST_CHUNK, SMALLEST_TABLE, Sizes, power_of_two_within
from jaxspec.scheduling.plan import Limits

MOST_STOPS = 16
# Prompt tokens of a row in a call, for each device that shares them. On GPUs a long prompt is read
# faster in larger parts, above all where devices sum their products.
LARGEST_CHUNK, LARGEST_CHUNK_ON_GPUS = 512, 2048
# Prompt tokens between two calls of rounds, and the seconds that they may take; of a row that is
# read slowly, tokens that are worth a call.
LARGEST_BUDGET, READ_SECONDS, LEAST_READ = 2048, 1.0, 128
# Seconds of the host for a call of an accelerator, and for each of its rows. A CPU's programs are
# called in no time, and their rounds take the cores that plans would.
HOST_CALL, HOST_ROW = 2e-3, 80e-6
# Rows of the smallest program that is never used to draft, if tokens are accepted at most so often,
# and what drafting must gain there: less is lost again by finding out what pays, and since the
# drafter reads all texts.
LEAST_CROWD, HIGH_ACCEPTANCE, LEAST_GAIN = 8, 0.8, 1.25
FIXED_ROUNDS = 8  # of a program that runs a fixed number, unless that is one


def engine_params(params: EngineParams, config: EngineConfig) -> EngineParams:
    """The parameters as this configuration needs them.

    Raises ValueError for what is no drafter, and for options that a deterministic engine does not
    have.
    """
    check_drafter(params.drafter)
    if config.deterministic:
        params = deterministic_params(params)
    return params


def adapts(params: EngineParams, config: EngineConfig) -> bool:
    """Whether the engine chooses its trees; see EngineConfig.adaptive."""
    if config.adaptive is not None or not params.default_tree:
        return bool(config.adaptive)
    alone = not params.stages and jax.process_count() == 1
    drafts = not params.round_options().speculation.is_plain
    return drafts and alone and params.speculation.acceptance == "match"


def learns_costs(params: EngineParams, config: EngineConfig) -> bool:
    """Whether an engine that adapts corrects its costs by the time that calls took.

    Not where nobody asked for that and the tree changes texts by rounding: then the text would
    depend on how fast the machine happened to be.
    """
    is_exact = params.target.dtype == jnp.float32 or params.speculation.verify_width is not None
    return bool(config.adaptive) or is_exact


def engine_sizes(params: EngineParams, cache: CacheConfig, config: EngineConfig) -> Sizes:
    """The sizes of an engine's programs.

    Rows are split evenly over the shards, so there may be a few more than asked for. Raises
    ValueError for a cache that does not fit the device.
    """
    shards = params.data_parallel
    num_rows = -(-config.max_rows // shards) * shards
    largest = LARGEST_CHUNK_ON_GPUS if _platform(params) == "gpu" else LARGEST_CHUNK
    chunk = largest * params.sequence_parallel
    if config.deterministic:
        budget = prefill_budget(params, config)
        chunk = fixed_chunk(num_rows, cache.max_length, budget, LARGEST_CHUNK)
    return Sizes(
        num_rows=num_rows,
        shards=shards,
        max_length=cache.max_length,
        page_size=cache.page_size,
        num_pages=memory.num_pages(params, cache, num_rows),
        max_stops=MOST_STOPS,
        scratch_slots=params.speculation.scratch_slots,
        max_chunk=chunk,
        max_rounds=config.rounds_per_call,
        fixed_rounds=min(FIXED_ROUNDS, config.rounds_per_call) if _is_fixed(params, config) else 0,
        fixed=config.deterministic,
        trees=config.trees,
        budget=prefill_budget(params, config),
        read_call=read_call(params),
        # A CPU attends up to the longest context, however wide the table is.
        least_table=cache.max_length if is_on_cpu(params) else SMALLEST_TABLE,
    )


def prefill_budget(params: EngineParams, config: EngineConfig) -> int:
    """EngineConfig.prefill_budget, as estimated where it is None: a power of two."""
    if config.prefill_budget is not None:
        return config.prefill_budget
    tokens = prior_costs(params.target, params.drafter).tokens_as_long_as(READ_SECONDS)
    return max(LEAST_READ, min(LARGEST_BUDGET, power_of_two_within(tokens)))


def least_read(params: EngineParams, config: EngineConfig) -> int:
    """Limits.least_read: of a device that reads slowly. Where calls of all rows have one size,
    sharing costs nothing."""
    is_slow = config.prefill_budget is None and prefill_budget(params, config) < LARGEST_BUDGET
    return LEAST_READ if is_slow and not config.deterministic else 1


def read_call(params: EngineParams) -> int:
    """Sizes.read_call, as estimated."""
    costs = prior_costs(params.target, params.drafter)
    launch = 0.0 if is_on_cpu(params) else HOST_CALL
    return costs.tokens_as_long_as(launch)


def _is_fixed(params: EngineParams, config: EngineConfig) -> bool:
    if params.stages:  # the host launches each round
        if config.fixed_rounds is False:
            raise ValueError("a pipeline runs fixed numbers of rounds: leave fixed_rounds out")
        return True
    if config.fixed_rounds is not None:
        return config.fixed_rounds
    return _platform(params) == "gpu"


def is_on_cpu(params: EngineParams) -> bool:
    return _platform(params) == "cpu"


def _platform(params: EngineParams) -> str:
    return next(iter(params.target.embed.devices())).platform


def scheduler_limits(params: EngineParams, sizes: Sizes, config: EngineConfig) -> Limits:
    """The limits of an engine's scheduler.

    Raises ValueError for swapping where rows are split over devices, or over processes.
    """
    shards, preemption = params.data_parallel, config.preemption
    devices = [] if params.mesh is None else params.mesh.devices.flat
    is_split = shards > 1 or len({device.process_index for device in devices}) > 1
    if config.preemption == "swap" and is_split:
        raise ValueError(
            "preemption must be recompute or auto where rows are split over devices, or a model "
            "over processes: such rows cannot be swapped"
        )
    if is_split:
        preemption = "recompute"
    elif config.deterministic:  # what is generated was computed by other products than a prompt
        preemption = "swap"
    longest = pages_for(sizes.max_length + params.speculation.scratch_slots, sizes.page_size)
    holds_all = sizes.num_pages // shards > sizes.num_rows // shards * longest
    host_parts = 0
    if preemption != "recompute" and not holds_all:  # else nobody is swapped
        host_parts = int(config.swap_memory * 2**30 / part_bytes(params, sizes))
    share_pages, snapshots = not params.target.config.is_recurrent, None
    if not share_pages and config.prefix_caching and not is_split:
        snapshots = int(config.snapshot_memory * 2**30 / snapshot_bytes(params, sizes))
    return Limits(
        num_rows=sizes.num_rows,
        num_pages=sizes.num_pages // shards - 1,
        page_size=sizes.page_size,
        max_length=sizes.max_length,
        scratch_slots=params.speculation.scratch_slots,
        tokens_per_round=params.speculation.max_depth + 1,
        shards=shards,
        prefill_budget=max(prefill_budget(params, config), sizes.num_rows),
        least_read=least_read(params, config),
        largest_read=sizes.max_chunk,
        largest_verified=sizes.verified_at_once,
        verified_rows=sizes.verified_rows,
        max_rounds=sizes.fixed_rounds or sizes.max_rounds,
        runs_all_rounds=sizes.fixed_rounds > 0,
        crowded_rows=crowded_rows(params),
        unseen_rounds=1 if adapts(params, config) else None,
        undrafted_rows=undrafted_rows(params, sizes, config),
        max_queue=config.max_queue,
        watermark=0.0 if holds_all else Limits.watermark,
        prefix_caching=config.prefix_caching and (share_pages or bool(snapshots)),
        share_generated=not config.deterministic,
        share_pages=share_pages,
        prefix_tokens_read_again=params.drafter.num_reread_tokens,
        snapshots=snapshots,
        preemption=preemption,
        part_pages=sizes.part_pages,
        host_parts=host_parts,
        swaps_only=config.deterministic,
    )


def crowded_rows(params: EngineParams) -> int | None:
    """Rows for which the host needs as long as the device for a round; None: never by 2**12 rows,
    and on a CPU, which is the host.

    An estimate, so that the plans for the same requests are the same on every day.
    """
    if is_on_cpu(params):
        return None
    costs = prior_costs(params.target, params.drafter)
    for rows in (2**power for power in range(13)):
        if HOST_CALL + rows * HOST_ROW >= costs.seconds(-(-rows // params.data_parallel), PLAIN):
            return rows
    return None


def undrafted_rows(params: EngineParams, sizes: Sizes, config: EngineConfig) -> int | None:
    """Limits.undrafted_rows, as estimated: with the fewest rows that run in a program which even
    HIGH_ACCEPTANCE would not make faster than plain decoding by LEAST_GAIN. None: there is none.

    Only where nobody asked for a tree, and texts are the same in programs that compute less.
    """
    exact = params.target.dtype == jnp.float32 and not config.deterministic
    if config.adaptive is not None or not (
        adapts(params, config) and exact and params.mesh is None
    ):
        return None
    rows = LEAST_CROWD
    while rows < 2 * sizes.num_rows:
        if expected_gain(params, rows, HIGH_ACCEPTANCE) < LEAST_GAIN:
            return rows // 2 + 1
        rows *= 2
    return None


def deterministic_params(params: EngineParams) -> EngineParams:
    """The parameters with a fixed verify width.

    Raises ValueError for options whose texts depend on more than the request.
    """
    speculation = params.speculation
    if params.stages or (params.mesh is not None and params.mesh.size > 1):
        raise ValueError(
            "deterministic=True runs on one device: sums over several depend on a row's place"
        )
    if speculation.acceptance != "match":
        raise ValueError(
            'deterministic=True needs acceptance="match": with another rule the text depends on '
            "the drafter"
        )
    if speculation.verify_width is not None:
        return params
    width, nodes = default_verify_width(_platform(params)), speculation.num_nodes
    if nodes > width:
        raise ValueError(
            f"deterministic=True pads verifications to {width} nodes, and this tree has {nodes}: "
            f"give SpeculationConfig(verify_width={nodes}), to every engine whose texts are to "
            "agree"
        )
    return params.replace(speculation=dataclasses.replace(speculation, verify_width=width))


def fixed_chunk(num_rows: int, max_length: int, budget: int, largest: int) -> int:
    """Prompt tokens of a row in the one program that reads: a power of two.

    All rows together read about ``budget`` tokens in a call.
    """
    chunk = SMALLEST_CHUNK
    while chunk < min(largest, max_length) and 2 * chunk * num_rows <= budget:
        chunk *= 2
    return chunk
