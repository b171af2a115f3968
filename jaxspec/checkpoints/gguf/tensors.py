"""The tensors of a GGUF file, widened to float32 as they are read."""

import dataclasses
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
        *outer, inputs = self.shape
        count = outer[0] if outer else 1  # a vector is read as a row
        index = (*index, *(slice(None),) * (len(self.shape) - len(index)))
        rows, columns = index if outer else (slice(None), *index)
        bytes_of_row = num_bytes(self.kind, (inputs,))
        blocks = np.memmap(self.file, np.uint8, "r", self.offset, (count, bytes_of_row))
        kind = gguf.GGMLQuantizationType[self.kind]
        values = gguf.quants.dequantize(np.ascontiguousarray(blocks[self._stored(rows)]), kind)
        values = values.reshape(-1, inputs)[:, columns] + np.float32(self.shift)
        return values if outer else values[0]

    def _stored(self, rows: slice) -> slice | np.ndarray:
        """Where these rows are in the file."""
        if not self.heads:
            return rows
        order = np.arange(self.shape[0]).reshape(self.heads, -1, 2).swapaxes(1, 2)
        return order.reshape(-1)[rows]
