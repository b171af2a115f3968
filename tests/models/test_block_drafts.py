"""Drafts of block heads, from files as their publishers write them to tokens, are those of the
published equations in NumPy: after a prompt, after a round, after all pending tokens are read."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec import functional
from jaxspec.checkpoints.block import load_block_head
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import BlockDrafter
from jaxspec.functional import EngineParams
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.json.values import read_json
from tests.helpers.block_heads import block_target
from tests.helpers.block_reference import block_outputs, norm
from tests.helpers.correction_reference import (
    domino_path,
    jacobi_passes,
    lilicorr_scores,
    markov_path,
    selector_scores,
)
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.published_heads import (
    BLOCK,
    HIDDEN,
    PUBLISHED,
    TARGET_LAYERS,
    VOCAB,
    save_published,
)
from tests.helpers.random_models import (
    admit_prompts,
    empty_state,
    random_prompts,
    read_prompts,
    tiny_config,
)

TARGET = block_target(
    tiny_config(vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=TARGET_LAYERS), mark=0.5
)
EMBED, DEPTH = np.asarray(TARGET.embed[:VOCAB]), 4
Tensors = Mapping[str, np.ndarray]
jit_captured = jax.jit(
    lambda tokens: decoder.run(
        TARGET,
        tokens,
        jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
        TARGET.no_states(),
        dense_causal_attend,
        (1, 2),
    )[2],
    compiler_options=FAST_COMPILE,
)


def published_chain(
    tensors: Tensors, config: Mapping[str, Any], tokens: list[int], captured: np.ndarray
) -> list[int]:
    """The greedy draft after committed tokens, the last of which is not in ``captured``."""
    *context, root = tokens
    positions = block_outputs(
        tensors, config, EMBED, captured[: len(context)], root, DEPTH, with_root=True
    )
    outputs = positions[-DEPTH:]
    assert TARGET.lm_head is not None
    options = config["dflash_config"]
    logits = outputs @ np.asarray(TARGET.lm_head.weight, np.float64)[:, :VOCAB]
    logits *= options.get("output_multiplier", 1)
    if cap := options.get("final_logit_softcapping"):
        logits = cap * np.tanh(logits / cap)
    if "xpress_rank" in config:
        return jacobi_passes(tensors, positions, logits, [context[-1], root], DEPTH)
    if "selector_rank" in options:
        return best_pairs(
            selector_scores(tensors, outputs, logits, root, options["selector_top_k"]), root
        )
    if "lilicorr_enabled" in options:
        fused = captured[len(context) - 1].astype(np.float64) @ tensors["fc.weight"].T
        state = norm(fused, tensors["hidden_norm.weight"], config["rms_norm_eps"])
        sizes = {"heads": options["lilicorr_num_heads"], "eps": config["rms_norm_eps"]}
        sizes |= {"count": options["lilicorr_candidate_topk"], "scale": 8.0, "vector_eps": 1e-4}
        return best_pairs(
            lilicorr_scores(tensors, outputs, logits, root, state, EMBED, sizes), root
        )
    if "markov_rank" in options:
        return walked(functools.partial(markov_path, tensors, outputs, logits), root)
    if "gru_hidden_dim" in options:
        first = options["pure_draft_prefix_len"]
        path = functools.partial(domino_path, embeddings=EMBED, first=first)
        return walked(functools.partial(path, tensors, outputs, logits), root)
    return logits.argmax(axis=1).tolist()


def best_pairs(scores: list[dict[tuple[int, int], float]], root: int) -> list[int]:
    path, before = [], root
    for pairs in scores:
        behind = {token: score for (at, token), score in pairs.items() if at == before}
        before = max(behind, key=lambda token: behind[token])
        path.append(before)
    return path


def walked(logits_of: Callable[[list[int]], np.ndarray], root: int) -> list[int]:
    path = [root]
    while len(path) <= DEPTH:
        path.append(int(logits_of(path)[-1].argmax()))
    return path[1:]


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_file_is_read_as_its_publisher_means_it(kind: str, tmp_path: Path):
    """The quick guard of the test below."""
    head = load_block_head(save_published(kind, tmp_path), TARGET.config, jnp.dtype("float32"))
    named = {"windowed": "dflash", "jetspec": "dflash", "modelopt": "dflash"}
    named |= dict.fromkeys(("vanilla", "gated", "rnn"), "dspark")
    assert head.method == named.get(kind, kind) and head.capture == (1, 2)
    assert head.max_depth == BLOCK - (head.method != "dspark")
    assert (head.confidence is not None) == (head.method == "dspark")
    windows = [layer.attention.window for layer in head.config.layers]
    seen = {"windowed": ([9, None], "windows"), "jetspec": ([None] * 2, "all")}
    seen |= {"modelopt": ([9] * 2, "all"), "dflash2": ([9] * 2, "none")}
    assert (windows, head.causal) == seen.get(kind, ([None] * 2, "none"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", PUBLISHED)
def test_drafts_are_those_of_the_published_equations(kind: str, tmp_path: Path):
    directory = save_published(kind, tmp_path)
    tensors, config = (
        load_file(directory / "model.safetensors"),
        read_json(tmp_path / "config.json"),
    )
    head = load_block_head(directory, TARGET.config, jnp.dtype("float32"))
    params = EngineParams(
        target=TARGET, drafter=BlockDrafter(head=head), speculation=SpeculationConfig.chain(DEPTH)
    )
    prompts = random_prompts((5, 21, 30), vocab=VOCAB - 1)
    state = admit_prompts(params, empty_state(params, 3, 64, 7), prompts)
    state = read_prompts(params, state, 4, greedy=True)
    decode = jax.jit(
        functools.partial(functional.decode, trees=True, greedy=True, max_rounds=1),
        compiler_options=FAST_COMPILE,
    )
    found = []
    for caught_up in (False, False, True):
        if caught_up:
            state = jax.jit(functional.catch_up)(params, state, jnp.arange(3))
        tokens, lengths = np.asarray(state.rows.tokens), np.asarray(state.rows.context_lens)
        states = np.asarray(jit_captured(state.rows.tokens))
        state, emitted = decode(params, state, 1)
        assert emitted.trees is not None
        for row, size in enumerate(lengths):
            path = tokens[row, : size + 1].tolist()
            wanted = published_chain(tensors, config, path, states[row])
            assert emitted.trees.tokens[0, row, 1:].tolist() == wanted
            found += wanted
    assert len(set(found)) > 6, "the drafts differ"
