"""Shapes of paged attention with heads of 256 that tests and benchmarks share; see cases.py."""

from pallas_kernels.benchmark import Benchmark
from pallas_kernels.paged_attention import cases
from pallas_kernels.paged_attention.cases import Case

TEST_CASES = (
    Case("W: one query", (70, 130), 1, 16, 2, 256, 64),
    Case("W: two heads a group, pages of 16", (0, 1, 63, 64, 65), 1, 4, 2, 256, 16),
    Case("W: tree of 16", (70, 0, 130), 16, 16, 2, 256, 16, tree=True),
    Case("W: tree of 64", (50, 1), 64, 8, 4, 256, 64, tree=True),
    Case("W: six heads a group", (70, 130), 11, 12, 2, 256, 64, tree=True),
    Case("W: window", (10, 200), 40, 8, 4, 256, 16, window=30),
    Case("W: window under a tree", (70, 330), 6, 8, 4, 256, 64, tree=True, window=40),
    Case("W: soft cap", (70, 130), 6, 4, 2, 256, 16, tree=True, softcap=1.5),
    Case("W: soft cap and window", (10, 200), 40, 4, 2, 256, 64, window=30, softcap=1.5),
    Case("W: causal chunk", (10, 200), 80, 16, 2, 256, 64),
    Case("W: first slot, padded", (70, 3), 9, 8, 4, 256, 16, first_slot=1, real_tokens=5),
)
LONG_CASES = (
    Case("LW: one query", (3000, 5, 1025), 1, 16, 2, 256, 64),
    Case("LW: a chain", (3000, 5, 1025), 6, 8, 4, 256, 16, tree=True),
    Case("LW: many pairs", (3000, 5, 1025) * 12, 6, 16, 4, 256, 64, tree=True),
    Case("LW: tree of 60", (3000, 5, 1025), 60, 16, 2, 256, 64, tree=True),
    Case("LW: window", (3000, 5, 1025), 60, 8, 4, 256, 16, tree=True, window=500),
    Case("LW: soft cap", (3000, 5, 1025), 16, 16, 8, 256, 64, tree=True, softcap=1.5),
    Case("LW: causal chunk", (2000, 0, 77), 512, 16, 4, 256, 64),
)

# The full attention layers of Qwen3.5-9B and of Qwen3.6-35B-A3B, and the layers of Gemma 3 4B, with
# windows and without. Several queries form a tree.
_SHAPES = (
    *(("16/4", 16, 4, None, 1, n, size) for n, size in ((1, 512), (8, 512), (8, 32768))),
    *(("16/4", 16, 4, None, t, n, size)
      for t in (1, 16) for n, size in ((1, 8192), (1, 32768), (8, 8192), (32, 8192))),
    ("16/4", 16, 4, None, 16, 1, 512),
    *(("16/4", 16, 4, None, 64, n, 8192) for n in (1, 8)),
    *(("16/2", 16, 2, None, 16, n, size) for n, size in ((1, 8192), (1, 32768), (8, 8192))),
    *(("8/4", 8, 4, window, t, n, 8192)
      for t in (1, 16) for n in (1, 8, 32) for window in (None, 1024)),
)  # fmt: skip
BENCHMARK_CASES = tuple(
    Case(
        f"{heads} heads, {batch} x {context}, {num_tokens} queries"
        + (f", window {window}" if window else ""),
        (context,) * batch,
        num_tokens,
        num_heads,
        kv_heads,
        256,
        page_size=64,
        tree=num_tokens > 1,
        window=window,
    )
    for heads, num_heads, kv_heads, window, num_tokens, batch, context in _SHAPES
)


def benchmarks() -> list[Benchmark]:
    """See cases.benchmarks."""
    return cases.benchmarks(BENCHMARK_CASES)
