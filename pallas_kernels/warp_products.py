"""Products of single warps on Hopper GPUs (mma.sync), below the level of Pallas: of 16 outputs, 8
rows, and 16 inputs in bfloat16 or 32 of 8 bits. Which entries of the operands a lane holds is told
in PTX's manual."""

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.words import Word


def shared_address(ref: Any) -> Word:
    """Where an array in shared memory begins."""
    return Word(llvm.ptrtoint(_i32(), utils.memref_ptr(ref)))


def load_matrices(address: Word) -> list[Any]:
    """Four matrices of 8 rows of 16 bytes: of each a lane has 4 bytes of row lane / 4.

    ``address``: of a row, in shared memory; lane l has that of row l mod 8 of matrix l / 8.
    """
    return list(
        utils.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
            address.value,
            result_types=4 * [_i32()],
            has_side_effects=True,
        )
    )


def multiply_add(sums: Any, a: Any, b: Any) -> list[Any]:
    """sums + a b; ``a``: four pairs of bfloat16, ``b``: two, ``sums``: four in float32."""
    return _multiply_add("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", sums, a, b)


def multiply_add_float8(sums: Any, a: Any, b: Any) -> list[Any]:
    """sums + a b; ``a``: four words of four e4m3 each, ``b``: two, ``sums``: four in float32."""
    return _multiply_add("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", sums, a, b)


def _multiply_add(product: str, sums: Any, a: Any, b: Any) -> list[Any]:
    operands = "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    types = 4 * [ir.F32Type.get()]
    return list(utils.inline_ptx(f"{product} {operands}", *a, *b, *sums, result_types=types))


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)
