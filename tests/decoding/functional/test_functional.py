"""The engine as pure functions: inside the caller's jit, under vmap, and saved half-way."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import SpeculationConfig, admit, decode, init_state, load, make_sampling, prefill
from jaxspec.checkpoints.orbax_io import restore_pytree, save_pytree
from jaxspec.decoding import round
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from tests.helpers.checkpoints import tiny_eagle3_head, tiny_llama
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import (
    admit_prompts,
    empty_state,
    jit_decode,
    jit_prefill,
    make_params,
    random_target,
    read_prompts,
    tiny_config,
)

PROMPTS = np.arange(24, dtype=np.int32).reshape(2, 12) * 7 % 320
COUNTS = np.array([12, 5], np.int32)
ROWS = np.arange(2)
SEED, ALL = np.uint32(5), 100
TREE = SpeculationConfig(num_nodes=10, max_depth=3, top_k=3)

# Restores a state in a process of its own and goes on. Arguments: model, head, state, output.
CONTINUE = """
import sys
import jax, numpy as np
from jaxspec import decode, load
from jaxspec.checkpoints.orbax_io import restore_pytree
from tests.decoding.functional.test_functional import TREE, empty
from tests.helpers.programs import FAST_COMPILE
params = load(sys.argv[1], sys.argv[2], speculation=TREE)
state = restore_pytree(sys.argv[3], empty(params))
state, _ = jax.jit(decode, static_argnums=2)(params, state, 100)
np.save(sys.argv[4], state.rows.tokens)
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("functional")
    target = tiny_llama(root / "target", num_hidden_layers=2)
    return target, tiny_eagle3_head(root / "head", target)


@pytest.fixture(scope="module")
def params(checkpoints):
    return load(*checkpoints, speculation=TREE)


def empty(params):
    return init_state(params, num_rows=2, max_length=64)


def generate(params, seeds, num_rounds):
    sampling = make_sampling(2, temperature=0.8, top_p=0.9, seeds=seeds)
    state = admit(params, empty(params), ROWS, PROMPTS, COUNTS, sampling=sampling)
    state, _ = prefill(params, state, width=PROMPTS.shape[1])
    return decode(params, state, num_rounds, max_rounds=ALL)[0]


run = jax.jit(generate, compiler_options=FAST_COMPILE)  # one program for most of what follows


@pytest.mark.slow
def test_vmap_over_seeds_equals_separate_runs(params):
    seeds = jnp.array([0, 1, 2, 3], jnp.uint32)
    mapped = jax.vmap(generate, in_axes=(None, 0, None))
    together = jax.jit(mapped, compiler_options=FAST_COMPILE)(params, seeds, ALL)
    for index, seed in enumerate(seeds):
        expected = run(params, seed, ALL).rows.tokens
        np.testing.assert_array_equal(together.rows.tokens[index], expected)
    found = np.asarray(together.rows.tokens)
    assert len({row.tobytes() for row in found}) == 4, "seeds must matter"


@pytest.mark.slow
def test_many_rounds_in_one_call_equal_one_at_a_time(params):
    state = run(params, SEED, 0)
    step = jax.jit(decode, static_argnums=2, compiler_options=FAST_COMPILE)
    for _ in range(64):
        state, _ = step(params, state, 1)
    np.testing.assert_array_equal(state.rows.tokens, run(params, SEED, ALL).rows.tokens)


@pytest.mark.slow
def test_many_rows_draft_where_a_shape_is_asked_for():
    params = make_params("ngram", SpeculationConfig.chain(3)).replace(most_drafting_rows=2)

    def drafted(num_rows: int, **options: Any) -> tuple[int, list[list[int]]]:
        prompts = np.tile(np.array([[5, 9, 5, 9, 5]], np.int32), (num_rows, 1))
        state = admit(params, empty_state(params, 3, 24), range(num_rows), prompts, [5] * num_rows)
        state, _ = jit_prefill(params, state, width=8)
        run = functools.partial(jit_decode, max_rounds=20, **options)
        state, emitted = run(params, state, 20, np.arange(num_rows))
        return int(emitted.drafted.sum()), state.rows.tokens[:num_rows].tolist()

    (some, few), (none, texts) = drafted(2), drafted(3)
    asked, same = drafted(3, shape=params.speculation.shape)
    assert some and asked and not none
    assert texts == same and texts[:2] == few


def test_a_pass_padded_for_the_kernels_sake_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    target = random_target(tiny_config(num_layers=1))
    params = make_params("ngram", SpeculationConfig.chain(3), target)
    prompts = [np.array([5, 9, 5, 9, 5]), np.array([7, 1])]
    state = admit_prompts(params, empty_state(params, 2, 48), prompts)
    state = read_prompts(params, state, greedy=True)

    def rows() -> Any:
        fresh = jax.jit(
            lambda params, state: decode(params, state, 40, greedy=True)[0].rows,
            compiler_options=FAST_COMPILE,
        )
        return jax.device_get(fresh(params, state))

    expected = rows()
    monkeypatch.setattr(round, "fewest_rows", lambda kernels: 11)  # as of 6 nodes for each row
    found = rows()
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.stats.accepted, expected.stats.accepted)
    assert expected.stats.accepted[:, 1].sum() > 0, "no draft was accepted"


@pytest.mark.slow
def test_a_state_saved_half_way_continues_in_a_new_process(params, checkpoints, tmp_path):
    half = run(params, SEED, 6)
    assert half.rows.active.any()
    save_pytree(tmp_path / "state", half)
    restored = restore_pytree(tmp_path / "state", empty(params))
    for saved, read in zip(jax.tree.leaves(half), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(saved, read)
    arguments = [*map(str, checkpoints), str(tmp_path / "state"), str(tmp_path / "tokens.npy")]
    subprocess.run([sys.executable, "-c", CONTINUE, *arguments], check=True, cwd=Path.cwd())
    expected = run(params, SEED, ALL).rows.tokens
    np.testing.assert_array_equal(np.load(tmp_path / "tokens.npy"), expected)


@pytest.mark.slow
def test_log_probabilities_and_hidden_states_are_those_of_a_plain_pass(checkpoints):
    """Those emitted with a token are the raw target's at the position before it."""
    tree = SpeculationConfig(num_nodes=6, max_depth=2, top_k=2)
    params = load(*checkpoints, speculation=tree)
    ask: Any = {"logprobs": True, "hidden": (1, -1)}

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def ask_for_all(params):
        sampling = make_sampling(2, temperature=0.8, seeds=3)
        state = admit(params, empty(params), ROWS, PROMPTS, COUNTS, sampling=sampling)
        state, first = prefill(params, state, width=12, **ask)
        state, later = decode(params, state, 6, **ask)
        return state.rows, first, later

    rows, first, later = ask_for_all(params)
    positions = jnp.broadcast_to(jnp.arange(64), (2, 64))
    target = params.target
    normed, _, captured = jax.jit(
        decoder.run, static_argnums=(4, 5), compiler_options=FAST_COMPILE
    )(target, rows.tokens, positions, target.no_states(), dense_causal_attend, (1, -1))
    logprobs = jax.nn.log_softmax(decoder.logits(target, normed))
    for row in range(2):
        place = int(COUNTS[row]) - 1  # of the token that the next one is sampled after
        for emitted in (first, later):
            for count, tokens, logprob, hidden in zip(
                emitted.counts[:, row], emitted.tokens[:, row],
                emitted.logprobs[:, row], emitted.hidden[:, row], strict=True,
            ):  # fmt: skip
                for index in range(int(count)):
                    assert tokens[index] == rows.tokens[row, place + 1]
                    expected = logprobs[row, place, tokens[index]]
                    np.testing.assert_allclose(logprob[index], expected, atol=1e-4)
                    np.testing.assert_allclose(hidden[index], captured[row, place], atol=1e-4)
                    place += 1
        assert place == rows.context_lens[row]
