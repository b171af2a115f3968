"""Speculation with quantized targets and drafters: the text of plain decoding, token for token."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder
from jaxspec.models.linear import Linear
from jaxspec.models.quantized.float4 import rounded_to_float4
from jaxspec.models.quantized.float8 import Float8Linear, rounded_to_float8
from jaxspec.models.quantized.grouped import GroupedLinear, rounded_to_groups
from jaxspec.models.quantized.schemes import rounded
from tests.decoding.test_exactness import sampling_of
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import generate, make_params, random_prompts, random_target
from tests.helpers.sampling_reference import reference_texts

PROMPTS = random_prompts((5, 17, 30))
CHAIN = SpeculationConfig.chain(5)
TREE = SpeculationConfig(num_nodes=12, max_depth=3, top_k=3)


def mixed_groups(linear: Linear) -> GroupedLinear:
    """Four bits with zeros, and groups in mixed order, as GPTQ's act-order leaves them."""
    order = np.random.default_rng(linear.in_size).permutation(linear.in_size)
    sorted_rows = linear.replace(weight=linear.weight[order])
    made = rounded_to_groups(sorted_rows, 4, 16, symmetric=False)
    inverse = np.argsort(order)
    groups = jnp.asarray(inverse // 16, jnp.int32)
    return made.replace(values=made.values[..., inverse], groups=groups)


def four_bits(linear: Linear, *, rounds: bool = False) -> GroupedLinear:
    """Groups of 32 keep the weights in the kernel's order; 16 where the inputs divide by less."""
    return rounded_to_groups(linear, 4, 16 if linear.in_size % 32 else 32, rounds=rounds)


def float8_groups(linear: Linear) -> Float8Linear:
    return rounded_to_float8(linear, linear.in_size // 16)


def float8_static(linear: Linear) -> Float8Linear:
    """Some of the inputs of tests are cut off."""
    return rounded_to_float8(linear).replace(input_scale=jnp.float32(2 / 448))


PLAIN_ROUNDINGS: dict[str, Callable[[Linear], Any]] = {
    "4 bits": four_bits,
    "mixed groups": mixed_groups,
    "4 bits, rounded inputs": functools.partial(four_bits, rounds=True),
    "8 bits": functools.partial(rounded_to_groups, bits=8, group=16),
    "4-bit floats": functools.partial(rounded_to_float4, form="nvfp4"),
    "float8": rounded_to_float8,
    "float8 groups": float8_groups,
    "float8 static": float8_static,
}
# In one program each, instead of one for each operation.
ROUNDINGS = {
    name: jax.jit(function, compiler_options=FAST_COMPILE)
    for name, function in PLAIN_ROUNDINGS.items()
}


def by_place(linear: Linear) -> Any:
    """Feed-forward weights in 4 bits that round their inputs, attention's in float8, the LM head's
    in 4 bits that do not."""
    if "ff" in linear.axes:
        return ROUNDINGS["4 bits, rounded inputs"](linear)
    attends = {"heads", "kv_heads"} & set(linear.axes)
    return ROUNDINGS["float8" if attends else "4 bits"](linear)


ROUNDINGS_OR_SEVERAL = ROUNDINGS | {"several formats": by_place}


@functools.cache
def target(name: str) -> Decoder:
    return rounded(random_target(), ROUNDINGS_OR_SEVERAL[name], lm_head=True)


def text(params: EngineParams, temperature: float) -> tuple[list[list[int]], Any]:
    sampling = sampling_of(temperature, len(PROMPTS))
    generated, state = generate(params, PROMPTS, page_size=4, sampling=sampling)
    return generated, state.rows.stats


@functools.cache
def plain(name: str, temperature: float) -> list[list[int]]:
    params = make_params("none", CHAIN, random_target())
    return text(params.replace(target=target(name)), temperature)[0]


def params_of(name: str, drafter: str, spec: SpeculationConfig) -> EngineParams:
    params = make_params(drafter, spec, random_target())
    own = rounded(params.drafter, ROUNDINGS_OR_SEVERAL[name], lm_head=True)
    return params.replace(target=target(name), drafter=own)


def check_acceptance(stats: Any) -> None:
    assert stats.accepted.sum() / stats.rounds.sum() > 1.2, "hardly a draft was accepted"


CASES = list(itertools.product(ROUNDINGS, ("ngram", "draft_model", "eagle3"), (CHAIN, TREE)))


def name_of(one: Any) -> str:
    return one if isinstance(one, str) else ("chain" if one.is_chain else "tree")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "drafter", "spec"), CASES, ids=name_of)
def test_the_text_is_that_of_plain_decoding(name: str, drafter: str, spec: SpeculationConfig):
    """The program of greedy rows, and the one of rows that sample."""
    for temperature in (0.0, 0.8):
        found, stats = text(params_of(name, drafter, spec), temperature)
        assert found == plain(name, temperature)
        check_acceptance(stats)


@pytest.mark.parametrize(
    ("name", "drafter", "spec"),
    [
        slow("several formats", "eagle3", TREE),
        ("several formats", "ngram", CHAIN),
        slow("4 bits", "eagle3", TREE),
        slow("4 bits, rounded inputs", "eagle3", TREE),
        slow("float8", "ngram", CHAIN),
    ],
    ids=name_of,
)
def test_rows_that_sample_and_a_greedy_one_have_the_text_of_plain_decoding(
    name: str, drafter: str, spec: SpeculationConfig
):
    params, temperatures = params_of(name, drafter, spec), (0.0, 0.8, 0.8)
    limits = [len(prompt) + 80 for prompt in PROMPTS]
    rows = sampling_of(0.8, len(PROMPTS)).replace(temperature=jnp.array(temperatures))
    found, state = generate(params, PROMPTS, page_size=4, sampling=rows, max_lens=limits)
    check_acceptance(state.rows.stats)
    sampling = [
        SamplingParams(temperature=temperature, top_p=0.9, seed=11 + row, max_tokens=80)
        for row, temperature in enumerate(temperatures)
    ]
    assert found == reference_texts(params.target, PROMPTS, sampling, max(limits), found)


def test_rounding_keeps_weights_apart_by_half_a_step():
    """Each weight is the nearest that its group can have."""
    linear = Linear(
        weight=jnp.asarray(np.random.default_rng(0).normal(size=(64, 3, 5)), jnp.float32),
        axes=("hidden", "two", "ff"),
    )
    wanted = np.moveaxis(np.asarray(linear.weight), 0, -1)
    for name in ("4 bits", "8 bits", "mixed groups"):
        own = ROUNDINGS[name](linear)
        group = 32 if name == "4 bits" else 16
        groups = np.arange(64) // group if own.groups is None else own.groups
        step = np.moveaxis(np.asarray(own.scale)[groups], 0, -1)
        found = np.asarray(own.dense(jnp.dtype("float32")))
        # The ends of a range with zeros may be off by one step: its zero is rounded, too.
        assert (np.abs(found - wanted) <= (1.01 if own.zero is not None else 0.51) * step).all()


def test_quantized_arrays_take_the_bytes_of_their_bits():
    linear = Linear(weight=jnp.ones((256, 8)), axes=("hidden", "ff"))
    own = ROUNDINGS["4 bits"](linear)
    assert own.values.on_device_size_in_bytes() == 256 * 8 // 2
    assert own.scale.shape == (8, 8)
