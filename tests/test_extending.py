"""docs/extending.md: its code runs, and does what the page says."""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import LLM, EngineParams, SpeculationConfig, admit, decode, init_state, prefill
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from tests.programs import FAST_COMPILE
from tests.random_models import CONFIG, make_params, random_target
from tests.sampling_reference import plain_logits

PAGE = Path(__file__).parent.parent / "docs/extending.md"
PROMPT = [71, 102, 279, 71, 102]


LIKELIEST = 100  # of 320 tokens: enough that some drafted token is among them


BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
LLM_EXAMPLE = [block for block in BLOCKS if "LLM(" in block]
CONTROLS_EXAMPLE = [block for block in BLOCKS if "make_controls(" in block]


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page's code defines, with a tiny model instead of the built-in one.

    The example of LLM is left out: it needs the built-in model. So is that of bias and penalties,
    which has a test of its own.
    """
    # Nearly a bigram model: its greedy text soon repeats itself, which the drafter finds.
    target = random_target(dataclasses.replace(CONFIG, vocab_size=320), context=0.05)
    tiny = make_params("none", SpeculationConfig.chain(0), target)
    names: dict[str, Any] = {"__name__": "extending"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxspec, "load", lambda **_: tiny)
        for block in BLOCKS:
            if block not in LLM_EXAMPLE + CONTROLS_EXAMPLE:
                exec(compile(block, str(PAGE), "exec"), names)
    return names


def text_of(params: EngineParams) -> list[int]:
    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def generate(params: EngineParams) -> jax.Array:
        state = init_state(params, num_rows=1, max_length=64)
        state = admit(params, state, [0], jnp.array([PROMPT]), [len(PROMPT)], max_lens=[40])
        state, _ = prefill(params, state, width=8)
        return decode(params, state, 40)[0].rows.tokens

    return np.asarray(generate(params))[0, :40].tolist()


@pytest.mark.slow
def test_the_example_of_llm_writes_the_text_of_plain_decoding(page: dict[str, Any]):
    [example] = LLM_EXAMPLE
    exec(compile(example, str(PAGE), "exec"), page)
    completion = page["completion"]
    [plain] = LLM(drafter="none").generate([completion.prompt_token_ids], page["sampling"])
    assert completion.token_ids == plain.token_ids
    assert completion.acceptance_length > 1, "no draft was accepted"


@pytest.mark.slow
def test_the_example_of_bias_and_penalties_holds(page: dict[str, Any]):
    [example] = CONTROLS_EXAMPLE
    exec(compile(example, str(PAGE), "exec"), page)  # it ends with an assertion


@pytest.mark.slow
def test_a_user_defined_drafter_changes_only_the_speed(page: dict[str, Any]):
    plain = EngineParams(
        target=page["loaded"].target,
        drafter=page["loaded"].drafter,
        speculation=SpeculationConfig.chain(0),
    )
    assert text_of(page["lossless"]) == text_of(plain)
    assert page["emitted"].accepted.sum() > 0, "no draft was accepted"


def test_a_user_defined_rule_is_followed(page: dict[str, Any]):
    """Every token of the lossy text is among the target's likeliest, and not all are the first."""
    rule = page["TopKRule"](k=LIKELIEST)
    lossy = page["lossy"].replace(speculation=SpeculationConfig.chain(4, acceptance=rule))
    target, text = lossy.target, text_of(lossy)
    logits = plain_logits(target, np.array([text]))
    likeliest = np.asarray(jax.lax.top_k(logits[0], LIKELIEST)[1])
    new = range(len(PROMPT), len(text))
    assert all(text[i] in likeliest[i - 1] for i in new)
    assert any(text[i] != likeliest[i - 1, 0] for i in new)


def test_emitted_logprobs_and_hidden_states_are_those_of_a_dense_pass(page: dict[str, Any]):
    target, emitted, first = page["lossless"].target, page["emitted"], page["first"]
    counts = np.asarray(emitted.counts)[:, 0]
    kept = np.arange(emitted.tokens.shape[2]) < counts[:, None]

    def flat(name: str) -> np.ndarray:
        later = np.asarray(getattr(emitted, name))[:, 0][kept]
        return np.concatenate([np.asarray(getattr(first, name))[0, 0], later])

    new = flat("tokens")
    text = jnp.array([[*PROMPT, *new]])
    positions = jnp.arange(text.shape[1])[None]
    final, _, captured = jax.jit(
        lambda: decoder.run(
            target, text, positions, target.no_states(), dense_causal_attend, (2, -1)
        ),
        compiler_options=FAST_COMPILE,
    )()
    before = slice(len(PROMPT) - 1, -1)  # the positions that the new tokens were sampled from
    assert captured is not None
    np.testing.assert_allclose(flat("hidden"), captured[0, before], atol=2e-3)
    log_probs = jax.nn.log_softmax(decoder.logits(target, final)[0, before])
    expected = np.take_along_axis(np.asarray(log_probs), new[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(flat("logprobs"), expected, atol=1e-3)
