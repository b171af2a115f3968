"""Arithmetic of a GPU thread that is written once: for MLIR's values, and in tests for numbers."""

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith


class Word:
    """An MLIR value of 32 bits, unsigned, with Python's operators."""

    def __init__(self, value: Any):
        self.value = value

    def _apply(self, operation: Any, other: "Word | int") -> "Word":
        i32 = ir.IntegerType.get_signless(32)
        right = other.value if isinstance(other, Word) else utils.c(other, i32)
        return Word(operation(self.value, right))

    def __add__(self, other: "Word | int") -> "Word":
        return self._apply(arith.addi, other)

    def __sub__(self, other: "Word | int") -> "Word":
        return self._apply(arith.subi, other)

    def __mul__(self, other: "Word | int") -> "Word":
        return self._apply(arith.muli, other)

    def __floordiv__(self, other: "Word | int") -> "Word":
        return self._apply(arith.divui, other)

    def __mod__(self, other: "Word | int") -> "Word":
        return self._apply(arith.remui, other)

    def __lshift__(self, other: "Word | int") -> "Word":
        return self._apply(arith.shli, other)

    def __rshift__(self, other: "Word | int") -> "Word":
        return self._apply(arith.shrui, other)

    def __and__(self, other: "Word | int") -> "Word":
        return self._apply(arith.andi, other)

    def __or__(self, other: "Word | int") -> "Word":
        return self._apply(arith.ori, other)

    def __xor__(self, other: "Word | int") -> "Word":
        return self._apply(arith.xori, other)
