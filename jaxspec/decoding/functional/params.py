"""The weights and static options of an engine, and how its functions run on a mesh."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
from jaxspec.decoding.drafters import Drafter, NoDrafter
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.state import EngineState
from jaxspec.models.decoder import Decoder
from jaxspec.models.pipeline_stage import Stage
from jaxspec.parallel import Layout, axes_size, partition_specs, result_specs
from jaxspec.parallel.pytree import Pytree, pytree, static
from pallas_kernels.selection import Kernels


@pytree
class EngineParams(Pytree):
    """A target, a drafter, and the options of speculation.

    Attributes:
      speculation: the largest draft tree, the acceptance rule, and how draft tokens are chosen.
      kernels: operations that run as kernels where their arguments fit; none by default.
      mesh: the devices; None: one device.
      stages: of a pipeline, those before the target's own layers (see models.pipeline_stage). An
        Engine runs them; the functions of this package need parameters without any.
      most_drafting_rows: rows up to which ``decode`` drafts where no shape is asked for, as load
        sets it for its default tree; None: any number. An Engine names the shape of each call.
      default_tree: nobody asked for this tree, so an Engine may choose a smaller one for each call.
    """

    target: Decoder
    drafter: Drafter
    speculation: SpeculationConfig = static()
    kernels: Kernels = static(default=Kernels())
    mesh: Mesh | None = static(default=None)
    stages: tuple[Stage, ...] = ()
    most_drafting_rows: int | None = static(default=None)
    default_tree: bool = static(default=False)

    @property
    def last_stage(self) -> "EngineParams":
        """Without the stages before: drafter, embeddings, the last layers and the LM head."""
        return self.replace(stages=())

    @property
    def layout(self) -> Layout:
        """How the state is sharded: as the target is."""
        return self.target.layout

    @property
    def data_parallel(self) -> int:
        """Devices that the rows are split over."""
        return axes_size(self.mesh, self.layout.batch)

    @property
    def sequence_parallel(self) -> int:
        """Devices that share each sequence."""
        return axes_size(self.mesh, self.layout.sequence)

    @property
    def drafter_name(self) -> str:
        kind = type(self.drafter)
        return f"{kind.__module__}.{kind.__qualname__}"

    def shape_for(self, num_rows: int) -> TreeShape | None:
        """The shape of a call of ``decode`` that names none; None: the largest."""
        most = self.most_drafting_rows
        return PLAIN if most is not None and num_rows > most else None

    def round_options(self, shape: TreeShape | None = None) -> RoundOptions:
        """The default options of a call with trees of this shape; None: the largest trees.

        Raises ValueError for a shape that the engine cannot run.
        """
        return RoundOptions(self.speculation_of(shape), self.kernels)

    def checked_options(self, options: RoundOptions) -> RoundOptions:
        """The options of one call, with a confidence only if its trees are chains.

        Raises ValueError for layers that the target does not have, more alternatives than there are
        tokens, or a confidence that is not told.
        """
        speculation, vocab = options.speculation, self.target.config.vocab_size
        top_logprobs, hidden = options.top_logprobs, options.hidden
        if not isinstance(top_logprobs, int) or not 0 <= top_logprobs <= vocab:
            raise ValueError(f"top_logprobs must be 0 to {vocab}, got {top_logprobs}")
        if top_logprobs and not (options.logprobs or options.prompt_logprobs):
            raise ValueError("top_logprobs needs logprobs=True or prompt_logprobs=True beside it")
        if options.confidence and not self.drafter.tells_confidence:
            raise ValueError("confidence=True needs a drafter with a confidence head")
        layers = self.target.config.num_layers
        if not isinstance(hidden, tuple | list):
            raise ValueError(f"hidden must be a tuple of layers, such as ({hidden},), not {hidden}")
        if not set(hidden) <= set(range(-1, layers + 1)):
            raise ValueError(
                f"hidden states {list(hidden)} cannot be given: the target has 0 to {layers}, and "
                "-1, the one after the final norm"
            )
        drafts_chains = speculation.is_chain and not speculation.is_plain
        confidence = options.confidence and drafts_chains
        return dataclasses.replace(options, hidden=tuple(hidden), confidence=confidence)

    def speculation_of(self, shape: TreeShape | None) -> SpeculationConfig:
        """The speculation of a call of this shape; None: the largest tree.

        Raises ValueError for a shape that the engine cannot run.
        """
        if isinstance(shape, SpeculationConfig):
            raise ValueError(
                "the shape of a call must be a TreeShape, not a SpeculationConfig: the rules come "
                "from the parameters"
            )
        if shape is not None and not isinstance(shape, TreeShape):
            raise ValueError(
                "the shape of a call must be a TreeShape, such as jaxspec.TreeShape(6, 3, 2) or "
                f"jaxspec.TreeShape.parse('chain:2'), not {shape!r}"
            )
        if isinstance(self.drafter, NoDrafter):
            if shape is not None and not shape.is_plain:
                raise ValueError("these parameters have no drafter: the only shape is PLAIN")
            shape = PLAIN
        if shape is None or shape.shape == self.speculation.shape:
            return self.speculation
        return self.speculation.with_shape(shape.shape)

    def check(self, state: EngineState, *, controls: bool = False) -> None:
        """Raises ValueError for a state that was made with other options than these, and for one
        without controls where they are needed; for parameters with stages, too."""
        if self.stages:
            raise ValueError("a pipeline's rounds are several programs: run it in a jaxspec.Engine")
        if controls and state.controls is None:
            raise ValueError(
                "the state was made without controls: make it with init_state(..., controls=True)"
            )
        if state.capacity != self.speculation:
            raise ValueError(
                f"the state was made for {state.capacity}, these parameters have "
                f"{self.speculation}: make the state with these parameters"
            )
        if state.dtype != str(self.target.dtype):
            raise ValueError(
                f"the state was made for weights in {state.dtype}, these parameters have "
                f"{self.target.dtype}: make the state with these parameters, or cast the weights"
            )
        if state.drafter != self.drafter_name:
            raise ValueError(
                f"the state was made for a {state.drafter}, these parameters have a "
                f"{self.drafter_name}: make the state with these parameters"
            )


def on_mesh(
    function: Callable[..., Any],
    params: EngineParams,
    state: EngineState,
    arguments: tuple[Any, ...],
    specs: tuple[Any, ...],
    outputs: Any,
) -> Any:
    """Call ``function(params, state, *arguments)`` on each device's shards, by shard_map.

    ``specs`` are the partition specs of the arguments. ``outputs`` are those of the second result;
    None: the function returns the state only.
    """
    if params.mesh is None:
        return function(params, state, *arguments)
    after = result_specs(state, params.layout)
    sharded = jax.shard_map(
        function,
        mesh=params.mesh,
        in_specs=(partition_specs(params), partition_specs(state, params.layout), *specs),
        out_specs=after if outputs is None else (after, outputs),
        check_vma=False,
    )
    return sharded(params, state, *arguments)


def with_found_specs(
    function: Callable[..., Any],
    params: EngineParams,
    state: EngineState,
    arguments: tuple[Any, ...],
    specs: tuple[Any, ...],
) -> Any:
    """What on_mesh returns, where the function decides the structure of its second result."""
    if params.mesh is None:
        return on_mesh(function, params, state, arguments, specs, None)
    # One spec for all arrays serves to see the structure.
    run = functools.partial(on_mesh, function, params, state, arguments, specs)
    _, structure = jax.eval_shape(lambda: run(P()))
    return run(partition_specs(structure, params.layout))


def row_spec(params: EngineParams) -> P:
    """The partition spec of an array [R, ...] that is split as rows are."""
    return params.layout.spec(("batch",))
