"""Sends and receives packets between Hopper GPUs, below the level of Pallas; see exchange.py.

All functions are called while a kernel is emitted, in one warpgroup. Data are MLIR values of 8
bytes, that is of four 2-byte entries of a row; address and number arithmetic is on 32-bit integers.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from pallas_kernels.reduce_add_rms_norm.exchange import PACKET, THREADS, WORD

COLUMN = THREADS * PACKET  # bytes from a thread's packet to its next one


def i32() -> Any:
    return ir.IntegerType.get_signless(32)


def i64() -> Any:
    return ir.IntegerType.get_signless(64)


def at(pointer: Any, offset: Any) -> Any:
    """``offset`` bytes past a pointer."""
    return utils.getelementptr(pointer, [offset], ir.IntegerType.get_signless(8))


def add(x: Any, y: Any) -> Any:
    return arith.addi(x, y if isinstance(y, ir.Value) else utils.c(y, i32()))


def multiply(x: Any, y: int) -> Any:
    return arith.muli(x, utils.c(y, i32()))


@dataclasses.dataclass(frozen=True)
class Area:
    """One thread's places in its block's area, for one exchange.

    Attributes:
      peers: pointers to the exchanges of all devices of the axis, in order.
      here: pointer to this device's exchange.
      offset: bytes from there to the thread's first packet of this exchange.
      number: the number of this exchange, the flag of its packets.
      counter: pointer to the thread's counter.
    """

    peers: Sequence[Any]
    here: Any
    offset: Any
    number: Any
    counter: Any

    @classmethod
    def open(
        cls, ctx: Any, exchange: Any, peers: Sequence[Any], start: Any, columns: int
    ) -> "Area":
        """Begin an exchange.

        Args:
          ctx: Mosaic's launch context.
          exchange: memref of this device's exchange.
          peers: logical ids of all devices of the axis, in order.
          start: bytes from the exchange's begin to the block's area.
          columns: packets of a thread in one exchange.
        """
        here = utils.memref_ptr(exchange)
        thread = arith.remui(mgpu.thread_idx(), utils.c(THREADS, i32()))
        counter = at(here, add(start, multiply(thread, WORD)))
        finished: Any = utils.inline_ptx(
            "ld.relaxed.sys.global.b32 $0, [$1];",
            counter,
            result_types=i32(),
            has_side_effects=True,
        )
        number = add(finished, 1)
        odd = arith.andi(number, utils.c(1, i32()))
        offset = add(multiply(odd, columns * COLUMN), multiply(thread, PACKET))
        return cls(
            peers=[utils.memref_ptr(ctx.to_remote(exchange, peer)) for peer in peers],
            here=here,
            offset=add(start, add(offset, THREADS * WORD)),
            number=number,
            counter=counter,
        )

    def send(self, peer: int, column: Any, values: Sequence[Any]) -> None:
        """Write values to a device, as its packets ``column``, ``column + 1``, ..."""
        first = at(self.peers[peer], add(self.offset, multiply(column, COLUMN)))
        for index, value in enumerate(values):
            low = arith.trunci(i32(), value)
            high = arith.trunci(i32(), arith.shrui(value, utils.c(32, i64())))
            utils.inline_ptx(
                f"st.relaxed.sys.global.v4.b32 [$0+{index * COLUMN}], {{$1, $2, $3, $4}};",
                first,
                low,
                self.number,
                high,
                self.number,
                has_side_effects=True,
            )

    def receive(self, columns: Sequence[int]) -> list[Any]:
        """Wait for this device's packets ``columns``; returns their values."""
        first = at(self.here, self.offset)
        kinds = [i64()] * len(columns)
        loop = scf.WhileOp(kinds, [])
        with ir.InsertionPoint.at_block_begin(loop.before.blocks.append()):
            values, missing = [], utils.c(0, i32())
            for column in columns:
                low, flag, high, other_flag = utils.inline_ptx(
                    f"ld.relaxed.sys.global.v4.b32 {{$0, $1, $2, $3}}, [$4+{column * COLUMN}];",
                    first,
                    result_types=[i32()] * 4,
                    has_side_effects=True,
                )
                for packet_flag in (flag, other_flag):
                    missing = arith.ori(missing, arith.xori(packet_flag, self.number))
                wide = arith.shli(arith.extui(i64(), high), utils.c(32, i64()))
                values.append(arith.ori(arith.extui(i64(), low), wide))
            again = arith.cmpi(arith.CmpIPredicate.ne, missing, utils.c(0, i32()))
            scf.condition(again, values)
        with ir.InsertionPoint.at_block_begin(loop.after.blocks.append(*kinds)):
            scf.yield_([])
        return list(loop.results)

    def close(self) -> None:
        """End the exchange: count it."""
        utils.inline_ptx(
            "st.relaxed.sys.global.b32 [$0], $1;",
            self.counter,
            self.number,
            has_side_effects=True,
        )


def pinned(value: Any) -> Any:
    """The same value, computed before what follows. Left to itself, LLVM adds up packets where the
    sum is used, after all have been received, and they do not fit the registers."""
    return utils.inline_ptx("mov.b64 $0, $1;", value, result_types=i64(), has_side_effects=True)
