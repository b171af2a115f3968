"""The programs of an engine whose mesh has devices of several processes.

The scheduler runs in process 0. Each program that it launches, the others launch too: they are told
its name and its arguments, which are small. The weights and the state are on the devices of all.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.decoding.functional import EngineParams
from jaxspec.engine.programs.pipeline.programs import single_process_programs
from jaxspec.engine.programs.programs import Programs
from jaxspec.engine.programs.sizes import Kind, Sizes
from jaxspec.parallel import HIDDEN_AXIS, MODEL_AXIS
from jaxspec.parallel.processes import Processes

LARGE = ("admit_rows", "prefill", "decode", "draft", "verify")

MakePrograms = Callable[[EngineParams, Sizes, int], Programs]


class Launch(NamedTuple):
    """Run a program, or (``action``) only compile it or forget it.

    Attributes:
      controlled: whether the state has controls meanwhile, see Programs.controlled.
      arguments, options: on the host, without the weights and the state.
    """

    action: str
    name: str
    controlled: bool = False
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] | None = None


class Tables(NamedTuple):
    """Take other page tables: the arguments of Programs.replace_tables."""

    tables: np.ndarray
    capacity: np.ndarray


def make_programs(processes: Processes | None) -> MakePrograms:
    """The maker of an engine's programs in these processes; None: in this process alone.

    It raises ValueError for a mesh that is not that of all processes' devices, one model on them
    all.
    """
    if processes is None:
        return single_process_programs
    kind = LeadingPrograms if processes.leads else FollowingPrograms

    def make(params: EngineParams, sizes: Sizes, max_programs: int) -> Programs:
        check_mesh(params, processes)
        return kind(processes, params, sizes, max_programs)

    return make


class SharedPrograms(Programs):
    """What process 0 and the others have in common."""

    compiles_beside = False  # the others are told in the order of launches

    def place_tables(self, tables: np.ndarray, capacity: np.ndarray) -> Any:
        rows = self.state.rows
        return _global(tables, rows.page_table.sharding), _global(
            capacity, rows.context_capacity.sharding
        )


class LeadingPrograms(SharedPrograms):
    """Tells the others what it launches."""

    def __init__(self, processes: Processes, params: EngineParams, sizes: Sizes, max_programs: int):
        processes.claim()
        self._processes = processes
        processes.tell(sizes)  # others may have less free memory
        super().__init__(params, sizes, max_programs)
        for name in LARGE:
            setattr(self, name, AnnouncedProgram(name, getattr(self, name), processes))
        self.small = {
            name: AnnouncedProgram(name, program, processes) for name, program in self.small.items()
        }

    def place_tables(self, tables: np.ndarray, capacity: np.ndarray) -> Any:
        self._processes.tell(Tables(tables, capacity))
        return super().place_tables(tables, capacity)

    def check_weights(self, params: EngineParams) -> None:
        if params is not self.params:
            raise ValueError("several processes cannot replace their weights: start them again")

    def use(self, params: EngineParams) -> None:
        """What they use is theirs alone: others are refused, see check_weights."""

    def reset(self) -> None:
        """Ends all processes: they cannot be known to have the same state, nor to be idle."""
        self._processes.fail("a call was interrupted, and several processes cannot start anew")


class FollowingPrograms(SharedPrograms):
    """Launches what process 0 launches."""

    def __init__(self, processes: Processes, params: EngineParams, sizes: Sizes, max_programs: int):
        processes.claim()
        self._processes = processes
        super().__init__(params, processes.next() or sizes, max_programs)

    def follow(self) -> None:
        """Launch what process 0 launches, until it ends."""
        while (message := self._processes.next()) is not None:
            if isinstance(message, Tables):
                self.replace_tables(*message)
            else:
                self._launch(message)

    def _launch(self, told: Launch) -> None:
        program = getattr(self, told.name) if told.name in LARGE else self.small[told.name]
        if told.action == "forget":
            program.clear_cache()
            return
        options = told.options or {}
        with self.controlled(Kind.FULL if told.controlled else Kind.GREEDY):
            if told.action == "compile":
                program.lower(self.params, self.state, *told.arguments, **options).compile()
                return
            result = program(self.params, self.state, *told.arguments, **options)
            self.state = result[0] if isinstance(result, tuple) else result


class AnnouncedProgram:
    """A program of process 0. The others are told before it is launched or compiled."""

    def __init__(self, name: str, program: Any, processes: Processes):
        self._name, self._program, self._processes = name, program, processes

    def __call__(self, params: EngineParams, state: Any, *arguments: Any, **options: Any) -> Any:
        arguments, options = self._tell("run", state, arguments, options)
        return self._program(params, state, *arguments, **options)

    def lower(self, params: EngineParams, state: Any, *arguments: Any, **options: Any) -> Any:
        arguments, options = self._tell("compile", state, arguments, options)
        return self._program.lower(params, state, *arguments, **options)

    def clear_cache(self) -> None:
        self._processes.tell(Launch("forget", self._name))
        self._program.clear_cache()

    def _tell(self, action: str, state: Any, arguments: Any, options: Any) -> Any:
        arguments, options = jax.device_get((arguments, options))  # a draft tree is on the devices
        controlled = state.controls is not None
        self._processes.tell(Launch(action, self._name, controlled, arguments, options))
        return arguments, options


def check_mesh(params: EngineParams, processes: Processes) -> None:
    """Raise ValueError for a mesh that these processes cannot serve together."""
    if params.stages:
        raise ValueError("several processes split the model by tp: a pipeline runs in one process")
    devices, mesh = jax.device_count(), params.mesh
    if mesh is None or mesh.size != devices:
        split = 1 if mesh is None else mesh.size
        raise ValueError(
            f"{processes.group.size} processes have {devices} devices together, and the model is "
            f"split over {split}: give tp {devices}"
        )
    others = [name for name in mesh.shape if name not in (MODEL_AXIS, HIDDEN_AXIS)]
    if any(mesh.shape[name] > 1 for name in others):
        raise ValueError("several processes split the model alone: neither rows nor sequences")


def _global(array: np.ndarray, sharding: Any) -> jax.Array:
    """The same array in all processes, on the devices of all. Nothing is compared or waited for."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
