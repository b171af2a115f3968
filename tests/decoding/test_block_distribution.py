"""Block heads, lookup and draft models keep the target's distribution: chi-square of whole rounds.

Every batch row is an experiment with a seed of its own. The counts of its first new tokens are
compared with the target's probabilities, which come from dense passes over all continuations.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import DraftModelDrafter, SuffixDrafter
from jaxspec.decoding.sampling import Sampling, make_sampling, process_logits
from jaxspec.functional import EngineParams
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from tests.decoding.test_acceptance import P_VALUE, chi_square
from tests.helpers.block_heads import CORRECTED, KINDS, OTHERS, block_params, block_target
from tests.helpers.random_models import (
    admit_prompts,
    empty_state,
    generate,
    jit_decode,
    make_drafter,
    noisy,
    random_prompts,
    read_prompts,
    texts,
)

# NEW tokens of each row: the first by prefill, the others by rounds. Four tokens are possible each.
ROWS, NEW, CHOICES = 6000, 4, 4
TEMPERATURE = 1.5
SPECS = {
    "chain": SpeculationConfig.chain(3),
    "tree": SpeculationConfig(num_nodes=10, max_depth=3, top_k=3),
}
[PROMPT] = random_prompts((17,), seed=3)


@functools.cache
def repeating() -> np.ndarray:
    """A prompt after which lookup finds something if the likeliest token comes first."""
    [text], _ = generate(
        block_params("dflash", SPECS["chain"]), [PROMPT], max_lens=[len(PROMPT) + 2 * NEW]
    )
    return np.array([*text, *PROMPT[-4:]], np.int32)


def drawn(kind: str, spec: SpeculationConfig, prompt: np.ndarray) -> tuple[np.ndarray, float]:
    """The first NEW tokens of each row, and the mean depth accepted."""
    if kind in ("suffix", "draft_model", "peagle"):
        target = block_target()
        drafter: Any = SuffixDrafter() if kind == "suffix" else make_drafter("peagle", target)
        if kind == "draft_model":
            drafter = DraftModelDrafter(model=noisy(target, 0.7))
        params = EngineParams(target=target, drafter=drafter, speculation=spec)
    else:
        params = block_params(kind.replace("suffix+", "ngram+"), spec)
    if kind.startswith("suffix+"):
        drafter = params.drafter
        params = params.replace(drafter=drafter.replace(lookup=SuffixDrafter(min_match=2)))
    return drawn_by(params, prompt)


def drawn_by(
    params: EngineParams, prompt: np.ndarray, temperature: float = TEMPERATURE
) -> tuple[np.ndarray, float]:
    """As ``drawn``, of these parameters."""
    length = (
        len(prompt) + NEW + params.speculation.max_depth
    )  # no round is cut short before the last token
    state = admit_prompts(
        params,
        empty_state(params, ROWS, length, 4),
        [prompt] * ROWS,
        sampling=sampling_of(ROWS, temperature),
        max_lens=np.full(ROWS, length, np.int32),
    )
    state = read_prompts(params, state, greedy=False)
    state, _ = jit_decode(params, state, length, max_rounds=length, greedy=False)
    found = np.array([text[len(prompt) : len(prompt) + NEW] for text in texts(state)])
    counts = state.rows.stats
    return found, float(counts.accepted[:, 1:].sum() / counts.rounds.sum())


def sampling_of(rows: int, temperature: float) -> Sampling:
    return make_sampling(
        rows, temperature=temperature, top_k=CHOICES, seeds=10**6 + jnp.arange(rows)
    )


@jax.jit
def after(target: decoder.Decoder, tokens: jax.Array, sampling: Sampling) -> jax.Array:
    """The target's probabilities [B, V] of the token after each row."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    normed, _, _ = decoder.run(target, tokens, positions, target.no_states(), dense_causal_attend)
    logits = decoder.logits(target, normed[:, -1:])
    return jax.nn.softmax(process_logits(logits, sampling)[:, 0])


@functools.cache
def expected(
    prompt: bytes, temperature: float, target: Callable[[], decoder.Decoder]
) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of a prompt by NEW tokens."""
    known, found = np.frombuffer(prompt, np.int32), {(): 1.0}
    for _ in range(NEW):
        rows = np.array([[*known, *path] for path in found], np.int32)
        sampling = sampling_of(len(rows), temperature)
        probs = np.asarray(after(target(), jnp.asarray(rows), sampling), np.float64)
        found = {
            (*path, int(token)): p * own[token]
            for (path, p), own in zip(found.items(), probs, strict=True)
            for token in np.flatnonzero(own)
        }
    assert len(found) == CHOICES**NEW
    return found


def p_value(
    found: np.ndarray,
    prompt: np.ndarray,
    temperature: float = TEMPERATURE,
    target: Callable[[], decoder.Decoder] = block_target,
) -> float:
    """Of a chi-square test against the target; 0 if an impossible continuation was seen."""
    probs = expected(prompt.tobytes(), temperature, target)
    counts = dict.fromkeys(probs, 0)
    for path in map(tuple, found.tolist()):
        if path not in counts:
            return 0.0
        counts[path] += 1
    wanted = ROWS * np.array(list(probs.values())) / math.fsum(probs.values())
    assert np.sum(wanted >= 8) >= 30
    return chi_square(np.array(list(counts.values())), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("shape", SPECS)
@pytest.mark.parametrize("kind", [*KINDS, *CORRECTED, *OTHERS])
def test_texts_have_the_targets_distribution(kind: str, shape: str, rule: str):
    found, depth = drawn(kind, dataclasses.replace(SPECS[shape], acceptance=rule), PROMPT)
    least = 0.2 if "reduced" in kind else 0.5  # such a head drafts half of the tokens
    assert least < depth < 2.5, "drafts must be accepted and refused"
    assert p_value(found, PROMPT) > P_VALUE
    assert p_value(found, PROMPT, 1.2 * TEMPERATURE) < 1e-9, "another distribution is noticed"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shape"), [("ngram+dspark", "tree"), ("suffix+dflash", "chain")])
def test_texts_of_a_mixture_have_the_targets_distribution(kind: str, shape: str):
    prompt = repeating()
    found, depth = drawn(kind, dataclasses.replace(SPECS[shape], acceptance="rejection"), prompt)
    looked_up = np.mean(found[:, 0] == prompt[len(PROMPT)])
    assert 0.3 < looked_up < 0.9, "some rows start by lookup, some by the head"
    assert 0.5 < depth < 2.5, "drafts must be accepted and refused"
    assert p_value(found, prompt) > P_VALUE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("suffix", "chain"),
        ("suffix", "tree"),
        ("draft_model", "chain"),
        ("peagle", "chain"),
        ("peagle", "tree"),
    ],
)
def test_texts_of_other_drafters_have_the_targets_distribution(kind: str, shape: str):
    prompt = repeating()
    spec = dataclasses.replace(SPECS[shape], acceptance="rejection")
    found, depth = drawn(kind, spec, prompt)
    assert 0.2 < depth < 2.5, "drafts must be accepted and refused"
    assert p_value(found, prompt) > P_VALUE
    assert p_value(found, prompt, 1.2 * TEMPERATURE) < 1e-9, "another distribution is noticed"
