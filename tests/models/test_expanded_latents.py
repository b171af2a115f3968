"""Latent attention in its two forms: the same logits and texts, and which one a pass takes."""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxspec import SamplingParams
from jaxspec import load as load_engine
from jaxspec.cache import Geometry, page_slots
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.mixers import LatentConfig
from jaxspec.config.rope import RopeConfig
from jaxspec.engine.engine import Engine
from jaxspec.models import attention, decoder
from jaxspec.models.attention import PagedAttend
from jaxspec.models.forward_pass import make_pass
from jaxspec.models.mixers.latent import LatentAttention, latent_shape
from jaxspec.parallel import ONE_SHARD, WHOLE
from pallas_kernels.paged_attention.parts import BLOCK
from pallas_kernels.selection import NO_KERNELS, Kernels
from tests.helpers.families import LENGTH
from tests.helpers.marks import slow
from tests.helpers.parity import load, paged_logits
from tests.helpers.programs import FAST_COMPILE

# A layer of DeepSeek-V3 with fewer heads and a narrower input.
DEEPSEEK = LatentConfig(
    num_heads=4,
    rope=RopeConfig(head_dim=64, theta=1e4),
    latent=512,
    key_dim=128,
    value_dim=128,
    query_latent=None,
    scale=192**-0.5,
    interleaved=True,
)
HIDDEN, TOKENS, COLUMNS, PAGE = 64, 512, 16, 64


@pytest.fixture
def form(monkeypatch: pytest.MonkeyPatch):
    """Makes all passes over prompts take one form."""

    def choose(expanded: bool) -> None:
        monkeypatch.setattr(LatentConfig, "expands", lambda self, tokens, slots: expanded)

    return choose


@pytest.mark.parametrize(
    ("page_size", "step"), [(7, 10), slow(1, 20), slow(3, 1), slow(5, 8), slow(40, 40)]
)
def test_both_forms_have_the_logits_of_transformers(checkpoint, form, page_size: int, step: int):
    directory, tokens, expected = checkpoint("deepseek_v3")
    model, found = load(directory), []
    for expanded in (True, False):
        form(expanded)
        found.append(paged_logits(model, tokens, page_size, step))
        np.testing.assert_allclose(found[-1], expected, rtol=0, atol=2e-4)
    np.testing.assert_allclose(*found, rtol=0, atol=2e-5)


def test_without_a_cache_too(checkpoint, form):
    directory, tokens, expected = checkpoint("deepseek_v3")
    model, found = load(directory), []
    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)

    def run(tokens: Array) -> Array:
        attend = attention.dense_causal_attend
        hidden, _, _ = decoder.run(model, tokens, positions, model.no_states(), attend)
        return decoder.logits(model, hidden)

    for expanded in (True, False):
        form(expanded)
        traced_anew = jax.jit(functools.partial(run), compiler_options=FAST_COMPILE)
        found.append(traced_anew(jnp.asarray(tokens)))
        np.testing.assert_allclose(found[-1], expected, rtol=0, atol=2e-4)
    np.testing.assert_allclose(*found, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("num_tokens", "num_slots", "expanded"),
    [(1, 1024, False), (64, 4096, False), (144, 8192, False), (160, 8192, True), (64, 64, True)],
)
def test_the_form_of_fewer_multiplications_is_taken(num_tokens, num_slots, expanded):
    assert DEEPSEEK.expands(num_tokens, num_slots) == expanded


def one_pass(
    words: int | None,
    num_tokens: int,
    invariant: bool = False,
    config: LatentConfig = DEEPSEEK,
    dtype: str = "float32",
    kernels: Kernels = NO_KERNELS,
) -> Any:
    """A layer's pass over one sequence, as a function and the shapes of its arguments."""
    mixer = latent_shape(config, HIDDEN, jnp.dtype(dtype), ONE_SHARD)
    state = jax.eval_shape(lambda: mixer.init_state(Geometry(1 + COLUMNS, PAGE, 1), WHOLE))
    layer: Any = types.SimpleNamespace(mixer=config, mixers=(config,), centred=False)

    def run(mixer: LatentAttention, state: Any, x: Array, table: Array, lens: Array):
        positions = lens[:, None] + jnp.arange(num_tokens)
        ancestors = None if words is None else jnp.ones((1, num_tokens, words), jnp.uint32)
        attend = PagedAttend(
            rows=jnp.arange(1),
            page_table=table,
            context_lens=lens,
            slots=page_slots(table, positions, jnp.ones_like(positions, bool), PAGE),
            positions=positions,
            kv_lens=lens + num_tokens,
            ancestors=ancestors,
            order_invariant=invariant,
        )
        step = make_pass([layer], positions, attend, 1e-6, WHOLE, kernels)
        product, state = mixer(x, state, step)
        return product.result(WHOLE, kernels), state

    struct = jax.ShapeDtypeStruct
    x = struct((1, num_tokens, HIDDEN), dtype)
    table, lens = struct((1, COLUMNS), jnp.int32), struct((1,), jnp.int32)
    return run, (mixer, state, x, table, lens)


@pytest.mark.parametrize(
    ("words", "num_tokens", "invariant", "expanded"),
    [
        (None, 512, False, True),
        (None, 16, False, False),
        (None, 512, True, False),
        (16, 512, False, False),
        (1, 1, False, False),
    ],
    ids=["chunk", "few tokens", "deterministic", "wide tree", "decoding"],
)
def test_only_chunks_of_prompts_are_expanded(
    words: int | None, num_tokens: int, invariant: bool, expanded: bool
):
    run, arguments = one_pass(words, num_tokens, invariant)
    assert ("expanded_attention" in str(jax.make_jaxpr(run)(*arguments))) == expanded


def test_a_chunk_takes_fewer_operations(form):
    """Multiplications of a head, of 512 tokens over 1,024 slots: 302 million instead of 671. The
    projections of the narrow input add little."""
    counted = {}
    for expanded in (True, False):
        form(expanded)
        run, arguments = one_pass(None, TOKENS)
        compiled = jax.jit(run).lower(*arguments).compile()
        analysis: Any = compiled.cost_analysis()
        counted[expanded] = analysis["flops"] / 2 / DEEPSEEK.num_heads
    slots = COLUMNS * PAGE
    up = DEEPSEEK.latent * (DEEPSEEK.key_dim + DEEPSEEK.value_dim)
    # The other form goes block by block: of a loop's passes only one is counted.
    of_blocks = TOKENS * (up + 2 * BLOCK * 2 * 576)
    assert counted[False] == pytest.approx(of_blocks, rel=0.1)
    assert counted[True] == pytest.approx(slots * (up + TOKENS * (192 + 128)), rel=0.1)
    assert counted[True] < 0.5 * TOKENS * (up + slots * 2 * 576)


def texts(directory: Any, drafter: str, page_size: int) -> list[list[int]]:
    params = load_engine(directory, drafter, dtype="float32")
    cache = CacheConfig(page_size=page_size, max_length=64)
    engine = Engine(params, cache, EngineConfig(max_rows=2))
    sampling = SamplingParams(max_tokens=16, stop_token_ids=())
    prompts = [list(range(3, 36)), [5] * 20]
    generations = engine.add_all(prompts, [sampling] * 2)
    engine.finish(generations)
    return [one.token_ids for one in generations]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_texts_are_those_of_the_other_form(checkpoint, form, monkeypatch, drafter: str):
    """Other pages, so that no program is traced before the form is chosen."""
    directory, widths = checkpoint("deepseek_v3")[0], []
    own = attention.expanded_attention

    def spied(q: Array, *arguments: Any, **options: Any) -> Array:
        widths.append(q.shape[1])
        return own(q, *arguments, **options)

    monkeypatch.setattr(attention, "expanded_attention", spied)
    form(False)
    expected = texts(directory, drafter, page_size=5)
    assert not widths
    monkeypatch.setattr(
        LatentConfig, "expands", lambda self, tokens, slots: tokens > 1 and slots >= tokens
    )
    assert texts(directory, drafter, page_size=9) == expected
    assert widths


@pytest.mark.parametrize(
    ("num_heads", "chosen", "calls"),
    [(16, "latent_attention", 1), (16, "paged_attention", 0), (4, "latent_attention", 0)],
)
def test_absorbed_attention_is_a_kernel_where_it_is_chosen_and_fits(num_heads, chosen, calls):
    config = dataclasses.replace(DEEPSEEK, num_heads=num_heads)
    kernels = Kernels(frozenset({chosen}))
    run, shapes = one_pass(1, 8, config=config, dtype="bfloat16", kernels=kernels)
    text = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == calls
