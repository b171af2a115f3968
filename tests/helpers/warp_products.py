"""Products of single warps on numbers, with the fragments of PTX's manual.

A lane l of mma.m16n8k16 holds of the first operand rows l / 4 and l / 4 + 8, of the second one
column l / 4; of each of them entries 2 (l mod 4) and the next, and both again 8 further. Of
m16n8k32 it holds four entries side by side, and those 16 further.
"""

import jax.numpy as jnp
import numpy as np

LANES = np.arange(32)
OUTPUTS, ROWS = 16, 8


def in_shared_memory(lines: np.ndarray) -> np.ndarray:
    """Bytes [n, rows, lines, 128] as the copy engine lays them out: tiles of 8 rows, in which
    chunks of 16 bytes are swizzled."""
    count, rows, per_row, _ = lines.shape
    tiles = lines.reshape(count, rows // 8, 8, per_row, 8, 16).transpose(0, 1, 3, 2, 4, 5)
    row = np.arange(8)[:, None]
    return tiles[..., row, row ^ np.arange(8), :].reshape(-1)


def loaded(memory: np.ndarray, places: np.ndarray) -> list[np.ndarray]:
    """The four words of each lane that ldmatrix loads."""
    chunks = memory[places[:, None] + np.arange(16)].view("<u4").astype(np.int64)  # [lanes, 4]
    matrices = chunks.reshape(4, 8, 4)
    return [matrix[LANES // 4, LANES % 4] for matrix in matrices]


def numbers(words: np.ndarray) -> np.ndarray:
    """Two bfloat16 of each word: [lanes, 2]."""
    return words.astype("<u4").view(jnp.bfloat16).reshape(-1, 2).astype(np.float64)


def product(first: list[np.ndarray], second: list[np.ndarray]) -> np.ndarray:
    """What mma.m16n8k16 makes of its operands, or m16n8k32 of words with four numbers: [16, 8]."""
    count = first[0].shape[-1]  # side by side
    a, b = np.zeros((OUTPUTS, 8 * count)), np.zeros((8 * count, ROWS))
    entries = count * (LANES % 4)[:, None] + np.arange(count)
    for at, values in enumerate(first):
        a[(LANES // 4 + at % 2 * 8)[:, None], entries + at // 2 * 4 * count] = values
    for at, values in enumerate(second):
        b[entries + at * 4 * count, (LANES // 4)[:, None]] = values
    return a @ b
