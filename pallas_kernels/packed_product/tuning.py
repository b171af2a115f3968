"""Sizes of the Hopper kernel's blocks, and how its products are split.

Measured on an H100: docs/results/kernels.md has the tables. Small CTAs are best where registers
leave memory for several: one has data while others wait. Blocks of 128 inputs, whose lines of
weights are 64 bytes, are slower by a fifth at 8 rows.
"""

import dataclasses

from pallas_kernels.h100 import MULTIPROCESSORS

OUTPUTS = 64  # of a warpgroup: what the tensor cores take
MOST_REGISTERS = 240  # of a thread that multiplies, if those that copy take few
LARGEST_STEP = 128  # inputs that are summed before the sums are scaled
SUMMED_ROWS = 64  # of more rows of 16 bits weights are scaled, instead of sums
SCALED_ROWS = 32  # scales of so many rows are copied at once: 128 bytes
SMALL = 4096 * OUTPUTS * MULTIPROCESSORS  # weights; of no more a product is over soon
MAX_SPLITS = 8
MOST_STAGES = 8
TILE_ROWS = 192  # of a CTA: sums of more rows do not fit the registers
SMALL_TILE_ROWS = 128
HALF_TILE_ROWS = 96  # of narrow products, so that fewer partial sums are needed
TILE_COST = 60  # of a CTA: as much time as so many of its rows
DEEP = 8192  # inputs: with so many and few outputs splitting pays for one more launch
MIN_SPLIT_DEPTH = 1024  # inputs: shorter parts end before the copies have come up to speed


@dataclasses.dataclass(frozen=True)
class PackedTuning:
    """One variant of the kernel.

    Attributes:
      warpgroups: that multiply; each has 64 outputs.
      block: inputs of a block; fewer where a part of the inputs is no multiple of it.
      unit: inputs whose weights a warpgroup has in registers at once: 32, 64 or 128.
      ctas: that share a multiprocessor and its memory.
      row_tile: most rows of a CTA.
      most_stages: most blocks of a CTA in shared memory.
      registers: of a thread that multiplies; those that copy take fewer. None: all have as many.
      ahead: a warpgroup widens its next weights while the tensor cores multiply.
    """

    warpgroups: int = 2
    block: int = 256
    unit: int = 64
    ctas: int = 2
    row_tile: int = TILE_ROWS
    most_stages: int = MOST_STAGES
    ahead: bool = False
    registers: int | None = None

    @property
    def tile(self) -> int:
        """Outputs of a CTA."""
        return OUTPUTS * self.warpgroups

    def row_parts(self, rows: int) -> int:
        """CTAs that share so many rows."""
        return -(-rows // self.row_tile)


def scales_weights(rows: int, x_bits: int) -> bool:
    """Whether weights are scaled, instead of sums."""
    return rows > SUMMED_ROWS and x_bits == 16


def scaled_rows(rows: int) -> int:
    """The rows that scales of ``rows`` rows have, padding included."""
    return -(-rows // SCALED_ROWS) * SCALED_ROWS


def packed_tuning(
    rows: int, depth: int, width: int, weight_bits: int = 4, x_bits: int = 16
) -> PackedTuning:
    """The variant for so many rows, inputs and outputs; the same for 8 rows and fewer, and so on:
    rows are padded to a multiple of 8. Weights of 8 bits are not widened."""
    rows = -(-rows // 8) * 8
    is_small = depth * width <= SMALL and weight_bits == 4
    is_wide, widens_to_float8 = x_bits == 16, weight_bits < x_bits == 8
    if rows <= 8:
        unit = 128 if is_small or widens_to_float8 else 64
        return PackedTuning(warpgroups=1, unit=unit, ctas=6)
    if rows <= 16:
        return PackedTuning(warpgroups=1, ctas=5)
    if rows <= 32 and not is_wide:
        if widens_to_float8:
            return PackedTuning(warpgroups=1, unit=64 if is_small else 128, ctas=3, ahead=True)
        return PackedTuning(warpgroups=1, ctas=4)
    if rows <= SUMMED_ROWS:
        fills = _fills(width) and weight_bits == 4
        return _tuning_of_sums(rows, is_small=is_small, fills=fills, is_wide=is_wide)
    row_tile = _row_tile(rows, width, x_bits)
    if is_wide:
        return PackedTuning(block=64, ctas=1, row_tile=row_tile)
    registers = MOST_REGISTERS
    return PackedTuning(block=128, unit=128, ctas=1, row_tile=row_tile, registers=registers)


def _row_tile(rows: int, width: int, x_bits: int) -> int:
    """Most rows of a CTA with two warpgroups. Of more than TILE_ROWS rows the one of two sizes with
    which all CTAs, one on each multiprocessor at a time, should be through first."""

    def cost(most: int) -> float:
        parts = -(-rows // most)
        ctas = parts * max(1, width // (2 * OUTPUTS))
        turns, splits = -(-ctas // MULTIPROCESSORS), max(1, MULTIPROCESSORS // ctas)
        return turns * (-(-rows // parts) + TILE_COST) / splits

    if rows > TILE_ROWS:
        return min((TILE_ROWS, SMALL_TILE_ROWS), key=cost)
    # Tiles of outputs for at most a quarter of the multiprocessors.
    is_narrow = 4 * width <= 2 * OUTPUTS * MULTIPROCESSORS
    halved = x_bits == 8 and is_narrow and rows > SMALL_TILE_ROWS
    return HALF_TILE_ROWS if halved else TILE_ROWS


def _fills(width: int) -> bool:
    """Whether outputs give one CTA of four warpgroups to nearly every multiprocessor."""
    ctas, rest = divmod(width, 4 * OUTPUTS)
    return not rest and 3 * MULTIPROCESSORS // 4 <= ctas <= MULTIPROCESSORS


def _tuning_of_sums(rows: int, *, is_small: bool, fills: bool, is_wide: bool) -> PackedTuning:
    """The tuning of 17 to SUMMED_ROWS rows; of rows of 8 bits, of more than 32."""
    if fills and not is_wide:
        return PackedTuning(warpgroups=4, unit=128, ctas=1)
    if fills and rows <= 48:  # more rows do not fit registers
        return PackedTuning(warpgroups=4, unit=128 if rows <= 32 else 64, ctas=1)
    if rows > 32:  # longer products of the tensor cores, which wait less often
        return PackedTuning(unit=128, ctas=1, ahead=True)
    if is_small:
        return PackedTuning(warpgroups=1, ctas=3, ahead=True)
    return PackedTuning(ctas=1, ahead=True)


def choose_splits_alone(
    rows: int, depth: int, width: int, weight_bits: int = 4, x_bits: int = 16
) -> int:
    """``choose_packed_splits`` where a launch of its own has to add up the partial sums."""
    if depth < DEEP:
        return 1
    return choose_packed_splits(rows, depth, width, weight_bits, x_bits)


def choose_packed_splits(
    rows: int, depth: int, width: int, weight_bits: int = 4, x_bits: int = 16
) -> int:
    """Parts of the inputs that are summed separately, so that all multiprocessors have work.

    It depends on the padded rows only. Partial sums cost time: where most multiprocessors have work
    for two warpgroups anyway, they have at most an eighth of the weights' bytes.
    """
    config = packed_tuning(rows, depth, width, weight_bits, x_bits)
    rows, splits = -(-rows // 8) * 8, 1
    tiles = width // config.tile * config.row_parts(rows)
    enough = MULTIPROCESSORS * 3 // 2 if weight_bits == 8 else MULTIPROCESSORS * 4 // 3
    while 2 * splits * tiles <= config.ctas * MULTIPROCESSORS and splits < MAX_SPLITS:
        part = depth // (2 * splits)
        has_idle = splits * tiles * min(config.warpgroups, 2) < enough
        if part < MIN_SPLIT_DEPTH or depth % (2 * splits * LARGEST_STEP):
            break
        if not has_idle and 4 * rows > part // 2 // 8:
            break
        splits *= 2
    return splits
