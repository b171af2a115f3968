"""Deterministic mode: in bfloat16, too, a text is the same alone, in any batch, however drafted."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM
from jaxspec.checkpoints.load import load
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN, SpeculationConfig, default_verify_width
from jaxspec.config.structured_output import StructuredOutput
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import Generation
from jaxspec.engine.limits import deterministic_params, fixed_chunk
from jaxspec.engine.programs.sizes import Kind, ReadKey, RoundsKey
from jaxspec.models.decoder import Decoder
from jaxspec.parallel import make_mesh
from tests.helpers.layouts import on_mesh
from tests.helpers.marks import slow
from tests.helpers.programs import traces
from tests.helpers.random_models import make_params, random_target, tiny_config

CHAIN = SpeculationConfig.chain(3)
TREE = SpeculationConfig(num_nodes=8, max_depth=4, top_k=3)
TARGET = random_target(tiny_config(), sharpness=1.0, context=0.5)
MAX_LENGTH, ROWS, FEW = 96, 4, 20  # tokens, rows, pages that make requests swap


def bfloat16[T](tree: T) -> T:
    def narrowed(x: Any) -> Any:
        return x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(narrowed, tree)


def new_engine(
    drafter: str,
    speculation: SpeculationConfig = CHAIN,
    *,
    num_pages: int | None = None,
    target: Decoder = TARGET,
    **options: Any,
) -> Engine:
    params = bfloat16(make_params(drafter, speculation, target))
    cache = CacheConfig(page_size=8, max_length=MAX_LENGTH, num_pages=num_pages)
    options = {"max_rows": ROWS, "rounds_per_call": 4, "deterministic": True} | options
    return Engine(params, cache, EngineConfig(**options))


def requests(count: int, seed: int = 0) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, many of which begin alike, and of which some are full pages. Every third request
    is greedy; some ask for log-probabilities."""
    rng = np.random.default_rng(seed)
    base = rng.integers(96, size=40).tolist()
    prompts, sampling = [], []
    for index in range(count):
        own = rng.integers(96, size=rng.integers(1, 12)).tolist()
        prompt = [*base[: rng.integers(41)], *own]
        prompts.append(prompt if index % 5 else base[: 8 * (1 + index // 5 % 5)])
        sampling.append(
            SamplingParams(
                max_tokens=int(rng.integers(1, 41)),
                temperature=(0.0, 0.8, 1.0)[index % 3],
                top_p=(1.0, 0.9)[index % 2],
                logprobs=0 if index % 4 == 3 else None,
                seed=index,
            )
        )
    return prompts, sampling


def result(generation: Generation) -> tuple[Any, ...]:
    """The tokens, and their log-probabilities to the last bit."""
    assert generation.finish_reason == "length", generation.error
    logprobs = generation.logprobs
    return generation.token_ids, logprobs and [entry.logprob for entry in logprobs]


def run_alone(engine: Engine, prompts: Any, sampling: Any) -> list[Any]:
    found = []
    for prompt, own in zip(prompts, sampling, strict=True):
        engine.finish([generation := engine.add(prompt, own)])
        found.append(result(generation))
    return found


def run_together(engine: Engine, prompts: Any, sampling: Any, seed: int = 0) -> list[Any]:
    """All at once, in a random order; some begin when others have begun."""
    order = np.random.default_rng(seed).permutation(len(prompts)).tolist()
    generations: dict[int, Generation] = {}
    for place, index in enumerate(order):
        generations[index] = engine.add(prompts[index], sampling[index])
        if place % 5 == 4:
            engine.step()
    engine.finish(generations.values())
    return [result(generations[index]) for index in range(len(prompts))]


def check_programs(engine: Engine) -> None:
    """One program that reads, and one of rounds for each shape, by kind; all are of one size."""
    keys = [key for key in engine.programs.ready if isinstance(key, (ReadKey, RoundsKey))]
    assert len({key.width for key in keys if isinstance(key, ReadKey)}) == 1
    assert len({(key.rows, key.columns) for key in keys}) == 1
    assert min(key.kind for key in keys) == Kind.SAMPLED


def test_all_calls_have_one_size():
    engine = new_engine("ngram")
    sizes, limits = engine.programs.sizes, engine.limits
    assert {sizes.rows_for(count) for count in (1, 2, 4)} == {ROWS}
    assert {sizes.columns_for(tokens) for tokens in (1, 50, MAX_LENGTH)} == {sizes.columns}
    assert {sizes.width_for(tokens) for tokens in (1, 30, sizes.max_chunk)} == {128}
    assert {sizes.kind_for(kind) for kind in (Kind.GREEDY, Kind.SAMPLED)} == {Kind.SAMPLED}
    assert (limits.preemption, limits.share_generated) == ("swap", False)
    # Without the mode a text comes from programs of several sizes.
    ordinary = dataclasses.replace(sizes, fixed=False)
    assert ordinary.rows_for(1) < ordinary.rows_for(4)
    assert ordinary.width_for(9) < ordinary.width_for(90)


@pytest.mark.slow
def test_texts_alone_and_in_batches_with_prefix_hits_and_swaps_are_the_same():
    prompts, sampling = requests(8)
    sampling = [dataclasses.replace(own, logprobs=None, max_tokens=32) for own in sampling]
    target = random_target(tiny_config(num_layers=1))
    engine = new_engine("ngram", num_pages=FEW, target=target)
    expected = run_alone(engine, prompts, sampling)
    assert run_together(engine, prompts, sampling) == expected
    assert engine.scheduler.preemptions["swap"] > 0
    assert engine.scheduler.preemptions["recompute"] == 0
    assert engine.scheduler.cache_statistics()[1] > 0
    check_programs(engine)
    assert (traces(engine.programs.prefill), traces(engine.programs.decode)) == (1, 1)


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """Each request alone, decoded plainly, without a prefix cache."""
    engine = new_engine("none", prefix_caching=False)
    return run_alone(engine, *requests(24))


@pytest.mark.parametrize(
    ("drafter", "speculation", "num_pages"),
    [
        slow("none", CHAIN, None),
        slow("ngram", CHAIN, FEW),
        slow("ngram", TREE, None),
        slow("eagle3", CHAIN, None),
        slow("eagle3", TREE, FEW),
    ],
)
def test_texts_and_logprobs_do_not_depend_on_drafter_batch_or_pages(
    expected: list[Any], drafter: str, speculation: SpeculationConfig, num_pages: int | None
):
    engine = new_engine(drafter, speculation, num_pages=num_pages)
    prompts, sampling = requests(24)
    for seed in range(2):  # the second time all prompts are cached
        assert run_together(engine, prompts, sampling, seed) == expected
    engine.shape = PLAIN
    assert run_together(engine, prompts, sampling, 2) == expected
    assert run_alone(engine, prompts, sampling) == expected
    check_programs(engine)
    swaps = engine.scheduler.preemptions["swap"]
    assert (swaps > 0) == (num_pages is not None)


@pytest.mark.slow
def test_the_built_in_model_in_bfloat16():
    """Also structured requests, whose rounds are two programs."""
    prompts = ["import json\n\n\ndef read(path):\n", "class Stack:\n", "def mean(values):\n"] * 3
    digits = StructuredOutput(regex="[0-9]{3}(, [0-9]{2}){2,6}")
    sampling = [
        SamplingParams(
            max_tokens=32,
            temperature=0.8 * (index % 2),
            seed=index,
            structured=digits if index in (4, 7) else None,
            stop_token_ids=(),
        )
        for index in range(len(prompts))
    ]
    texts = []
    for drafter, together, speculation, num_pages in (
        ("none", False, CHAIN, None),
        ("auto", True, CHAIN, None),
        ("ngram", True, TREE, 20),
    ):
        llm = LLM(
            drafter=drafter,
            speculation=speculation,
            dtype="bfloat16",
            max_length=128,
            num_pages=num_pages,
            engine=EngineConfig(max_rows=4, deterministic=True),
        )
        groups = [range(len(prompts))] if together else [[index] for index in range(len(prompts))]
        found: list[list[int]] = []
        for group in groups:
            own = [sampling[index] for index in group]
            completions = llm.generate([prompts[index] for index in group], own)
            found += [completion.token_ids for completion in completions]
        texts.append(found)
        check_programs(llm.engine)
    assert texts[0] == texts[1] == texts[2]


# Options.


@pytest.mark.parametrize("speculation", [CHAIN, TREE, SpeculationConfig.chain(0)])
def test_trees_that_fit_get_one_width(speculation: SpeculationConfig):
    params = deterministic_params(make_params("ngram", speculation))
    assert params.speculation.verify_width == default_verify_width("cpu")
    assert params.speculation.shape == speculation.shape


def test_the_default_tree_fits():
    params = load()
    assert deterministic_params(params).speculation.shape == params.speculation.shape


def test_a_width_that_was_given_is_kept():
    wide = SpeculationConfig(num_nodes=20, max_depth=4, top_k=8, verify_width=24)
    params = make_params("ngram", wide)
    assert deterministic_params(params) is params


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        (SpeculationConfig.chain(3, "rejection"), 'needs acceptance="match"'),
        (SpeculationConfig.chain(10), "tree has 11: give SpeculationConfig.verify_width=11., to"),
    ],
)
def test_options_that_cannot_be_combined_are_one_line(speculation: SpeculationConfig, message: str):
    with pytest.raises(ValueError, match=f"^deterministic=True [^\n]*{message}[^\n]*$"):
        new_engine("ngram", speculation)


def test_recomputation_and_several_devices_are_refused():
    with pytest.raises(ValueError, match=r'^preemption="recompute" is not exact[^\n]*$'):
        EngineConfig(deterministic=True, preemption="recompute")
    params = on_mesh(make_params("none", CHAIN), make_mesh(2))
    with pytest.raises(ValueError, match=r"^deterministic=True runs on one device[^\n]*$"):
        deterministic_params(params)


def test_the_chunk_of_all_rows_fills_the_budget():
    assert fixed_chunk(16, 2048, 2048, 512) == 128
    assert fixed_chunk(1, 2048, 2048, 512) == 512
    assert fixed_chunk(1, 100, 2048, 512) == 128
    assert fixed_chunk(64, 2048, 100, 512) == 16
