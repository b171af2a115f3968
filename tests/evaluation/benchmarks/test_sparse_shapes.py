"""Shapes of models whose layers attend to entries of spans or to pools, and what is counted."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import Geometry, PagedEntries, PagedLatent
from jaxspec.engine.memory import bytes_of_token
from jaxspec.evaluation.benchmarks.ahead_of_time import Job, decode_program
from jaxspec.evaluation.benchmarks.floors import floor_bytes
from jaxspec.evaluation.benchmarks.modes import make_params, parse_mode
from jaxspec.evaluation.benchmarks.random_params import with_random_tables
from jaxspec.evaluation.benchmarks.rounds import Workload
from jaxspec.evaluation.benchmarks.shapes import SHAPES
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.json.values import read_json
from pallas_kernels.selection import Kernels
from tests.helpers.sizes import decoder_of_zeros

BFLOAT16 = jnp.dtype("bfloat16")


@pytest.mark.parametrize("context", [40, 3000])
@pytest.mark.parametrize("shape", ["tiny-deepseek-v4", "tiny-glm-5-next"])
def test_of_entries_and_pools_those_are_read_that_a_token_attends_to(shape: str, context: int):
    """Of the arrays of a cache: the slots of a window or of what is chosen, of each span the entry,
    and the keys that indexers score, of which pools of 4 have one."""
    target = decoder_of_zeros(SHAPES[shape], BFLOAT16)
    params = make_params(parse_mode("plain"), target, None, None, Kernels())
    states = target.init_state(Geometry(2, 16, 1)).layers
    slots = [
        [x.nbytes // (x.shape[0] * x.shape[2]) for x in jax.tree.leaves(state)]
        for state in states
        if isinstance(state, PagedEntries | PagedLatent)
    ]
    if shape == "tiny-deepseek-v4":  # windows of 16; values and gates of a span, twice if of 4
        (near,), (_, of_four, index), (_, of_many), _ = slots
        read = 4 * min(context, 16) * near + (context // 32) * of_many // 2
        read += 2 * (min(context // 4, 16) * of_four // 4 + context // 4 * index // 4)
    else:  # keys and gates; a layer of the two has what the other chose
        (latent, index), (other,) = slots
        assert latent == other
        read = 2 * min(context, 16 + 3) * latent + context // 4 * index // 2
    assert floor_bytes(params, batch=5, context=context).target_kv == 5 * read
    assert bytes_of_token(params)[0] == sum(map(sum, slots))


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "glm-5-next"])
def test_shapes_of_entries_and_pools_are_those_of_published_configs(name: str):
    file = "glm-5.3-flash" if name == "glm-5-next" else name
    published = read_json(Path(__file__).parents[2] / f"models/configs/{file}.json")
    assert parse_model_config(published) == SHAPES[name]


def test_experts_of_token_ids_are_random_ones():
    target = with_random_tables(decoder_of_zeros(SHAPES["tiny-deepseek-v4"], BFLOAT16), seed=0)
    table = np.asarray(target.layers[0].mlp.of_tokens)  # pyright: ignore
    assert np.bincount(table.ravel(), minlength=8).min() > 100  # of 1000 tokens with 2 of 8 each
    assert (table[:, 0] != table[:, 1]).all()


def test_pages_of_entries_are_known_in_a_compiled_program():
    """Whose copies are counted there."""
    workload = Workload(batch=2, context=32, rounds=1, page_size=16, repeats=1)
    job = Job(SHAPES["tiny-deepseek-v4"], parse_mode("plain"), workload)
    program = decode_program(job, jax.devices("cpu")[:1])
    widths = {shape[-1] for shape in program.page_shapes}
    assert widths == {16, 4 * 16, 2 * 16}  # vectors, values and gates of two spans, of one
