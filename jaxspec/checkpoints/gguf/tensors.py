"""The tensors of a GGUF file, widened to float32 as they are read."""

import dataclasses
import math
from pathlib import Path

import numpy as np

from jaxspec.checkpoints.gguf.metadata import gguf
from jaxspec.checkpoints.gguf.names import num_bytes


@dataclasses.dataclass(frozen=True)
class WidenedTensor:
    """A tensor of a GGUF file under Hugging Face's name, and with its values.

    Attributes:
      offset: of its first byte in the file.
      kind: llama.cpp's name of its type.
      heads, shift: see names.NamedBlocks.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    offset: int
    kind: str
    heads: int = 0
    shift: int = 0
    dtype: str = "F32"

    def read(self, *index: slice) -> np.ndarray:
        """The slice at ``index``. The file is mapped only during the call."""
        index = (*index, *(slice(None),) * (len(self.shape) - len(index)))
        if len(self.shape) == 1:  # of a vector all is read
            return self._widened(self._bytes(slice(None))).reshape(-1)[self._stored(index[0])]
        rows, columns = index
        return self._widened(self.stored_bytes(rows))[:, columns]

    def stored_bytes(self, rows: slice) -> np.ndarray:
        """The bytes of these rows of a matrix, as they are in the file: [rows, bytes]."""
        return self._bytes(self._stored(rows))

    def _bytes(self, rows: slice | np.ndarray) -> np.ndarray:
        """Rows of the file. A vector is a row."""
        *outer, inputs = self.shape
        shape = math.prod(outer), num_bytes(self.kind, (inputs,))
        blocks = np.memmap(self.file, np.uint8, "r", self.offset, shape)
        return np.ascontiguousarray(blocks[rows])

    def _widened(self, blocks: np.ndarray) -> np.ndarray:
        values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[self.kind])
        return values.reshape(-1, self.shape[-1]) + np.float32(self.shift)

    def _stored(self, rows: slice) -> slice | np.ndarray:
        """Where these rows, or entries of a vector, are in the file."""
        if not self.heads:
            return rows
        order = np.arange(self.shape[0]).reshape(self.heads, -1, 2).swapaxes(1, 2)
        return order.reshape(-1)[rows]
