"""Facts about one compiled decoding round: launches, copies, all-reduces, registers.

They come from ahead-of-time compilation, so no GPU is needed. All sources are text: the program
(``compiled.as_text()``), XLA's list of launches after CUDA graphs were formed
(``*thunk_sequence_after_thunk_passes.txt`` under ``--xla_dump_to``), and the output of ptxas for
each Mosaic kernel (``MOSAIC_GPU_DUMP_PTXAS=1``).
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping

from jaxspec.evaluation.benchmarks.hlo import count_by_scope

GRAPH, LOOP = "kCommandBuffer", "kWhile"
ASYNC_START = "kAsyncStart"  # launches the entries nested in it on another stream
SLICES = "kDynamicSliceFusion"  # launches the entry nested in it, on slices of arrays
CONTAINERS = {GRAPH, LOOP, ASYNC_START, SLICES, "kConditional", "kSequential"}
# All-reduces: XLA's implementation over NVLink, and NCCL's.
ALL_REDUCES = {"kCollectiveKernel", "kAllReduce", "kAllReduceStart"}

_LAUNCH = re.compile(r"^( *)\d+: (k\w+)")
_ALL_REDUCE = re.compile(r"= .*? all-reduce(?:-start)?\(")
_KERNEL = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_KERNEL_SUFFIX = "_kernel_mosaic_gpu_kernel"
MOSAIC_CALL = 'custom_call_target="mosaic_gpu'


@dataclasses.dataclass(frozen=True)
class MosaicKernel:
    """A compiled kernel. A kernel compiled for several shapes appears several times.

    Attributes:
      registers: per thread.
      spilled_bytes: spill stores and loads, per thread.
    """

    name: str
    registers: int
    spilled_bytes: int


@dataclasses.dataclass(frozen=True)
class Launches:
    """The launches of the decode loop in one round, including those of its condition, or of a
    program that reads prompts.

    Launches in an inner loop or a branch count once.

    Attributes:
      in_graphs: launches that are nodes of a CUDA graph.
      outside: launches that the host makes one by one.
      graphs: CUDA graphs that the host launches in a round, or in a call.
      all_reduces: all-reduces; they are included in ``in_graphs`` and ``outside``.
      all_reduces_in_graphs: all-reduces that are nodes of a CUDA graph.
      loop_in_graph: whether the whole loop is one graph, so that the host does nothing between
        rounds.
    """

    in_graphs: int
    outside: int
    graphs: int
    all_reduces: int
    all_reduces_in_graphs: int
    loop_in_graph: bool


@dataclasses.dataclass(frozen=True)
class CompiledRound:
    """One round of a compiled decode program, or a call of one that reads prompts, on one of its
    devices.

    Attributes:
      page_copies: instructions that copy, transpose or gather a layer's KV pages.
      all_reduces: their number by scope, for example ``verify/mlp``.
      sent: what the device sends to others, see collective_volume.totals.
      argument_bytes: size of weights and state.
      temporary_bytes: memory in addition to arguments and results.
    """

    launches: Launches
    page_copies: int
    all_reduces: Mapping[str, int]
    sent: Mapping[str, tuple[int, float]]
    argument_bytes: int
    temporary_bytes: int
    kernels: tuple[MosaicKernel, ...]

    @property
    def sent_bytes(self) -> float:
        """By the device to others."""
        return sum(sent for _, sent in self.sent.values())


@dataclasses.dataclass(frozen=True)
class _Launch:
    """An entry of XLA's list, and the indices of the entries that enclose it, innermost last."""

    kind: str
    inside: tuple[int, ...]


def parse_launches(text: str, *, of_loop: bool = True) -> Launches:
    """Parse a thunk sequence: the launches of its largest loop, or all.

    Raises ValueError if it has no loop, but should.
    """
    entries = _nest(text)
    sizes = collections.Counter(i for x in entries for i in x.inside if entries[i].kind == LOOP)
    if of_loop and not sizes:
        raise ValueError("no loop in the launches: not a decode program, or XLA unrolled the loop")
    loop = max(sizes, key=lambda index: sizes[index]) if of_loop else None

    def in_graph(entry: _Launch) -> bool:
        return any(entries[index].kind == GRAPH for index in entry.inside)

    counted = [entry for entry in entries if loop is None or loop in entry.inside]
    launched = [entry for entry in counted if _launches(entry.kind)]
    reduces = [entry for entry in launched if entry.kind in ALL_REDUCES]
    in_graphs = sum(map(in_graph, launched))
    return Launches(
        in_graphs=in_graphs,
        outside=len(launched) - in_graphs,
        graphs=sum(entry.kind == GRAPH for entry in counted),
        all_reduces=len(reduces),
        all_reduces_in_graphs=sum(map(in_graph, reduces)),
        loop_in_graph=loop is not None and in_graph(entries[loop]),
    )


def parse_kernels(text: str) -> tuple[MosaicKernel, ...]:
    """Parse the output of ptxas, which may have other lines in between.

    Raises ValueError if a kernel's registers or spills are missing: no spill may be overlooked.
    """
    return tuple(_parse_kernel(piece) for piece in _pieces(text.splitlines()))


def count_page_copies(text: str, page_shapes: Iterable[tuple[int, ...]]) -> int:
    """Number of copies, transposes and gathers of KV pages in a program's text, in any layout."""
    dimensions = "|".join(",".join(map(str, shape)) for shape in sorted(set(page_shapes)))
    result = rf"= [^=]*?\w+\[(?:{dimensions})\][^=]*? "
    copy = re.compile(result + r"(?:copy|copy-start|transpose|all-gather|all-gather-start)\(")
    return sum(copy.search(line) is not None for line in text.splitlines())


def count_all_reduces(text: str) -> dict[str, int]:
    """Number of all-reduces in a program's text, by phase and part of the round."""
    return count_by_scope(text, _ALL_REDUCE)


def _nest(text: str) -> list[_Launch]:
    """All entries. An entry encloses those below it with deeper indentation."""
    entries: list[_Launch] = []
    around: list[tuple[int, int]] = []  # indentation and index
    for line in text.splitlines():
        if found := _LAUNCH.match(line):
            indentation = len(found[1])
            while around and around[-1][0] >= indentation:
                around.pop()
            entries.append(_Launch(found[2], tuple(index for _, index in around)))
            around.append((indentation, len(entries) - 1))
    return entries


def _launches(kind: str) -> bool:
    return kind not in CONTAINERS and not kind.endswith("Done")


def _pieces(lines: Iterable[str]) -> Iterator[list[str]]:
    """The lines of each kernel."""
    piece: list[str] = []
    for line in lines:
        if _KERNEL.search(line):
            if piece:
                yield piece
            piece = [line]
        elif piece:
            piece.append(line)
    if piece:
        yield piece


def _parse_kernel(lines: list[str]) -> MosaicKernel:
    text = "\n".join(lines)
    name, registers, spills = _KERNEL.search(text), _REGISTERS.search(text), _SPILLS.findall(text)
    if name is None or registers is None or not spills:
        raise ValueError(f"ptxas printed no registers or no spills after {lines[0]!r}")
    return MosaicKernel(
        name=name[1].removesuffix(_KERNEL_SUFFIX),
        registers=int(registers[1]),
        spilled_bytes=sum(int(size) for pair in spills for size in pair),
    )
