"""The programs with which a server begins: of short sampled requests, which serve greedy ones, too.

They are compiled side by side in other threads; compile_by_running.py then runs such requests.
"""

from concurrent.futures import ThreadPoolExecutor

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN, TreeShape
from jaxspec.engine.engine import Engine
from jaxspec.engine.host_drafter import drafts_on_host
from jaxspec.engine.programs.programs import Programs
from jaxspec.engine.programs.sizes import ReadKey, RoundsKey
from jaxspec.engine.warm_up.compile_all import batch_keys
from jaxspec.engine.warm_up.compile_early import begin_to_compile
from jaxspec.engine.warm_up.compile_kinds import Key

PROMPT_TOKENS, NEW_TOKENS = 8, 8
SHORT = SamplingParams(temperature=1.0, max_tokens=NEW_TOKENS)


def begin_short_requests(engine: Engine, most: int, pool: ThreadPoolExecutor) -> None:
    """Begin to compile in ``pool`` what short requests need: one alone, and ``most`` that begin
    together. A guess that the engine does not follow costs time, and nothing else."""
    begin_to_compile(engine.programs, short_keys(engine, most), pool)


def short_keys(engine: Engine, most: int) -> list[Key]:
    """The programs that the engine is expected to run for them. Those of the rounds of many are
    left out where their tree depends on how well the first one drafts, and those of all rounds
    where the host drafts: they have masks."""
    shapes, programs = engine.shapes, engine.programs
    alone = [_with(key, shape=_first_shape(engine)) for key in _keys(programs, 1)]
    together, undrafted = _keys(programs, most), shapes.crowds.is_crowd(most)
    if undrafted:
        together = [_with(key, shape=PLAIN)._replace(undrafted=True) for key in together]
    elif shapes.policy is not None:
        together = [key for key in together if isinstance(key, ReadKey)]
    keys = dict.fromkeys([*alone, *together])
    only_reads = drafts_on_host(programs.params, SHORT)
    return [key for key in keys if isinstance(key, ReadKey) or not only_reads]


def _keys(programs: Programs, count: int) -> list[Key]:
    return batch_keys(programs, [PROMPT_TOKENS] * count, SHORT)


def _with(key: Key, shape: TreeShape) -> Key:
    return key._replace(shape=shape) if isinstance(key, RoundsKey) else key


def _first_shape(engine: Engine) -> TreeShape:
    """The tree of the first rounds."""
    shapes, programs = engine.shapes, engine.programs
    if engine.shape is not None or shapes.policy is None:
        return shapes.compiled_ahead(engine.shape)[-1]
    return shapes.policy.first(shapes.costs, programs.sizes.rows_for(1))
