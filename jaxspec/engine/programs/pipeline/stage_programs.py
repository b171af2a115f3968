"""The programs on the devices of one stage of a pipeline."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxspec.cache import CommittedPath, ModelState, PagedKV
from jaxspec.decoding.functional import EngineParams, pipelined
from jaxspec.engine.programs.sizes import Sizes
from jaxspec.engine.programs.xla_options import compiler_options, passage_options
from jaxspec.models.pipeline_stage import Stage
from jaxspec.parallel import named_shardings


class StagePrograms:
    """The programs of one of the stages before the last, and what its layers keep.

    Attributes:
      weights: the layers.
      states: of the layers.
    """

    def __init__(self, stage: Stage, params: EngineParams, sizes: Sizes):
        self.weights, self.sizes = stage, sizes
        weight = jax.tree.leaves(stage)[0]
        fixed = params.speculation.verify_width is not None
        options = functools.partial(compiler_options, weight, deterministic=fixed)
        whole = passage_options(weight)
        jit = functools.partial(jax.jit, donate_argnums=1, compiler_options=options() | whole)
        passing = functools.partial(
            pipelined.pass_stage,
            capture=params.drafter.capture,
            kernels=params.kernels,
            isolate_blocks=fixed,
        )
        self.run_round = jit(passing)
        self.run_read = jit(passing, compiler_options=options(reads=True) | whole)
        self.commit = jit(functools.partial(pipelined.commit_stage, kernels=params.kernels))
        self.reset_rows = jit(pipelined.reset_stage)
        self.copy_pages = jit(pipelined.copy_stage_pages)
        self.save = jit(pipelined.save_from_stage)
        self.restore = jit(pipelined.restore_to_stage)
        self.states = self._new_states()

    def _new_states(self) -> ModelState:
        size = self.sizes.num_pages, self.sizes.page_size, self.sizes.num_rows
        make = functools.partial(pipelined.init_stage, self.weights, *size)
        place = named_shardings(self.weights.mesh, jax.eval_shape(make), self.weights.layout)
        return jax.jit(make, out_shardings=place)()

    def restart(self) -> None:
        """With empty states."""
        for array in jax.tree.leaves(self.states):
            array.delete()
        self.states = self._new_states()

    def __call__(self, program: Callable[..., Any], *arguments: Any) -> Any:
        """Launch one of the programs. Arguments are brought to the stage's devices."""
        result = program(self.weights, self.states, *self.placed(arguments))
        self.states, *rest = result if isinstance(result, tuple) else (result,)
        return rest[0] if rest else None

    def placed[T](self, tree: T) -> T:
        """On the stage's devices, split as its weights are."""
        mesh, layout = self.weights.mesh, self.weights.layout
        return jax.device_put(tree, named_shardings(mesh, tree, layout))

    def commit_path(self, path: CommittedPath) -> None:
        """Keep the accepted nodes of a round."""
        in_place = all(isinstance(state, PagedKV) for state in self.states.layers)
        if not (path.is_chain and in_place):
            self(self.commit, path)

    def clear_cache(self) -> None:
        for program in vars(self).values():
            if hasattr(program, "clear_cache"):
                program.clear_cache()
