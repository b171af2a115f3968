"""With 8-bit pages, too, speculation never changes the text: token for token, float32."""

import functools
import itertools
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.checkpoints.orbax_io import restore_pytree, save_pytree
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import PLAIN, SpeculationConfig
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import Generation
from jaxspec.functional import EngineParams
from jaxspec.models.quantized.grouped import rounded_to_groups
from jaxspec.models.quantized.schemes import rounded
from jaxspec.parallel import make_mesh, stage_meshes
from pallas_kernels.float8 import BYTES
from tests.decoding.test_exactness import PROMPTS, TREES, Case, check, plain_texts, sampling_of
from tests.engine import test_deterministic, test_mesh_engine
from tests.helpers.engines import CHAIN, LENGTH, SAMPLED, seal
from tests.helpers.float8_caches import with_float8
from tests.helpers.layouts import in_stages, on_mesh
from tests.helpers.marks import slow
from tests.helpers.random_models import (
    DRAFTERS,
    NEW_TOKENS,
    admit_prompts,
    empty_state,
    generate,
    jit_decode,
    make_params,
    random_prompts,
    read_prompts,
    texts,
)

CHOICES = (DRAFTERS, tuple(TREES), (1, 16, 64), (3,), (0.0, 0.8))
ALL_CASES = [Case(*choice) for choice in itertools.product(*CHOICES)]


def float8_params(name: str, spec: SpeculationConfig) -> EngineParams:
    return with_float8(make_params(name, spec))


@functools.cache
def plain_float8_texts(temperature: float) -> list[list[int]]:
    params = float8_params("none", SpeculationConfig.chain(1))
    return generate(params, PROMPTS, sampling=sampling_of(temperature, len(PROMPTS)))[0]


@pytest.mark.slow  # by default: the engine, below
@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_text_is_that_of_plain_decoding(case: Case):
    params = float8_params(case.drafter, TREES[case.tree])
    check(case, params, plain_float8_texts(case.temperature))


@pytest.mark.slow
def test_text_is_another_than_with_wide_pages():
    assert plain_float8_texts(0.8) != plain_texts(0.8)


@pytest.mark.slow
def test_a_state_saved_half_way_goes_on(tmp_path):
    params, sampling = float8_params("eagle3", TREES["tree12"]), sampling_of(0.8, 3)
    empty = empty_state(params, 3, 32 + NEW_TOKENS)
    limits = np.array([len(prompt) + 60 for prompt in PROMPTS[:3]], np.int32)
    state = admit_prompts(params, empty, PROMPTS[:3], sampling=sampling, max_lens=limits)
    state = read_prompts(params, state)
    state, _ = jit_decode(params, state, 5, max_rounds=NEW_TOKENS, shape=None, greedy=False)
    save_pytree(tmp_path / "state", state)
    restored = restore_pytree(tmp_path / "state", like=state)
    found, _ = jit_decode(params, restored, 100, max_rounds=NEW_TOKENS, shape=None, greedy=False)
    plain = plain_float8_texts(0.8)
    assert texts(found) == [
        row[:limit] for row, limit in zip(plain[:3], limits.tolist(), strict=True)
    ]


# The engine: requests that share pages, and that lose them.

SHARED = random_prompts((24,), seed=5)[0].tolist()
ENGINE_PROMPTS = [SHARED + p.tolist() for p in random_prompts((7, 1, 12, 9, 3, 11), seed=3)]


def engine(params: EngineParams, num_pages: int | None = None, **options: Any) -> Engine:
    cache = CacheConfig(page_size=8, max_length=LENGTH, num_pages=num_pages)
    options = {"max_rows": 4, "rounds_per_call": 4} | options
    return Engine(params, cache, EngineConfig(**options))


def sampled(temperature: float) -> SamplingParams:
    return replace(SAMPLED, temperature=temperature)


def run(own: Engine, temperature: float = 0.8) -> list[Generation]:
    """Every second request is sampled."""
    sampling = [SamplingParams(temperature * (i % 2), seed=i, max_tokens=20) for i in range(6)]
    generations = own.add_all(ENGINE_PROMPTS, sampling)
    own.finish(generations)
    assert not any(one.error for one in generations)
    return generations


@functools.cache
def expected(temperature: float = 0.8) -> list[list[int]]:
    """Plain decoding on one device, one request after the other, nothing shared."""
    own = engine(float8_params("none", CHAIN), max_rows=1, prefix_caching=False)
    own = seal(own, sampled(temperature), 40)
    return [one.token_ids for one in run(own, temperature)]


def plainly(own: Engine) -> list[list[int]]:
    """Greedy texts without drafts, one request after the other, nothing shared."""
    own.shape, found = PLAIN, []
    for index, prompt in enumerate(ENGINE_PROMPTS):
        found.append(own.add(prompt, SamplingParams(max_tokens=20, cache_salt=f"salt {index}")))
        own.finish(found[-1:])
    own.shape = None
    return [one.token_ids for one in found]


@pytest.mark.parametrize(
    ("drafter", "preemption", "temperature"),
    [
        ("ngram", "swap", 0.0),  # greedy: of smaller programs, in which it decodes plainly, too
        slow("ngram", "swap", 0.8),
        slow("mixed", "swap", 0.8),
        slow("eagle3", "swap", 0.8),
        slow("eagle3", "recompute", 0.8),
        slow("draft_model", "recompute", 0.8),
    ],
)
def test_shared_and_lost_pages_change_no_text(drafter: str, preemption: str, temperature: float):
    own = engine(float8_params(drafter, CHAIN), num_pages=15, preemption=preemption)
    seal(own, sampled(temperature), 40)
    wanted = expected(temperature) if temperature else plainly(own)
    found = run(own, temperature)
    assert [one.token_ids for one in found] == wanted
    assert sum(one.cached_tokens for one in found) > 0, "no page was shared"
    assert own.scheduler.preemptions[preemption] > 0
    kept = [leaf for leaf in jax.tree.leaves(own.programs.state.pool) if leaf.ndim == 4]
    assert kept and {leaf.dtype for leaf in kept} == {BYTES}


@pytest.mark.parametrize(
    ("drafter", "model", "sequence"),
    [
        slow("eagle3", 2, 1),
        slow("eagle3", 1, 2),
        slow("eagle3", 4, 1),
        slow("draft_model", 2, 2),
        slow("ngram", 2, 1),
    ],
)
def test_devices_that_share_a_model_generate_the_same(drafter: str, model: int, sequence: int):
    mesh = make_mesh(model, sequence_parallel=sequence)
    params = on_mesh(make_params(drafter, CHAIN), mesh, shard_drafter=False)
    own = engine(with_float8(params))
    assert [one.token_ids for one in run(seal(own, SAMPLED, 40))] == expected()


@pytest.mark.slow
def test_stages_generate_the_same():
    params = make_params("eagle3", CHAIN)
    meshes = stage_meshes(make_mesh(1, pipeline_parallel=2))
    own = engine(with_float8(in_stages(params, (1, 1), meshes, shard_drafter=False)))
    assert [one.token_ids for one in run(own)] == expected()


# Every kind of request: grammars, penalties, biases, stop tokens, log-probabilities.


def any_request(drafter: str, bits: int | None, **options: Any) -> list[Generation]:
    params = make_params(drafter, test_mesh_engine.CHAIN, test_mesh_engine.TARGET)
    if bits is not None:
        scheme = functools.partial(rounded_to_groups, bits=bits, group=16)
        params = params.replace(target=rounded(params.target, scheme, lm_head=True))
    options = {"max_rows": 4, "rounds_per_call": 4} | options
    own = Engine(
        with_float8(params),
        test_mesh_engine.CACHE,
        EngineConfig(**options),
        make_matcher=lambda spec: test_mesh_engine.compiler().matcher(spec),
    )
    return test_mesh_engine.run(test_mesh_engine.sealed(own))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 4], ids=["float32 weights", "4-bit weights"])
def test_requests_of_every_kind_have_the_text_that_they_have_alone(bits: int | None):
    alone = any_request("none", bits, max_rows=1)
    for drafter in ("ngram", "eagle3"):
        for one, wanted in zip(any_request(drafter, bits), alone, strict=True):
            assert one.token_ids == wanted.token_ids, one.sampling
            assert one.finish_reason == wanted.finish_reason


@pytest.mark.slow
def test_deterministic_mode_holds_in_bfloat16():
    """Tokens and log-probabilities, to the last bit: alone, and together with too few pages."""

    def deterministic(drafter: str, num_pages: int | None = None, **options: Any) -> Engine:
        params = make_params(drafter, test_deterministic.CHAIN, test_deterministic.TARGET)
        cache = CacheConfig(8, test_deterministic.MAX_LENGTH, num_pages)
        options = {"max_rows": 4, "rounds_per_call": 4, "deterministic": True} | options
        params = with_float8(test_deterministic.bfloat16(params))
        return Engine(params, cache, EngineConfig(**options))

    prompts, sampling = test_deterministic.requests(24)
    plain = deterministic("none", prefix_caching=False)
    alone = test_deterministic.run_alone(plain, prompts, sampling)
    crowded = deterministic("eagle3", num_pages=test_deterministic.FEW)
    assert test_deterministic.run_together(crowded, prompts, sampling) == alone
