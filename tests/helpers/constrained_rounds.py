"""Rounds in two calls with masks from the host, and a text that a bigram table restricts."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxspec import functional
from jaxspec.config.speculation import TreeShape
from jaxspec.decoding.sampling import Sampling
from jaxspec.decoding.state import EngineState, Status
from jaxspec.functional import EngineParams
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import jit_admit, padded

_CHOICES = ("shape", "greedy")
jit_draft = jax.jit(functional.draft, static_argnames=_CHOICES, compiler_options=FAST_COMPILE)
jit_verify = jax.jit(
    functional.verify_drafts,
    static_argnames=(*_CHOICES, "logprobs", "hidden"),
    compiler_options=FAST_COMPILE,
)
jit_prefill = jax.jit(
    functional.prefill, static_argnames=("width", "greedy"), compiler_options=FAST_COMPILE
)

Mask = Callable[[Any], np.ndarray]  # of the trees [B, N], or of None at the end of the prompts
Take = Callable[[int, list[int]], None]  # a row and the tokens that it has committed


def generate_restricted(
    params: EngineParams,
    prompts: list[np.ndarray],
    sampling: Sampling,
    masks: Mask,
    take: Take = lambda row, tokens: None,
    *,
    new_tokens: int,
    stop_token_ids: tuple[int, ...] = (),
    shape: TreeShape | None = None,
    greedy: bool = False,
) -> tuple[list[list[int]], EngineState]:
    """The new tokens of each row, every one restricted by ``masks``, and the final state."""
    lens = np.array([len(prompt) for prompt in prompts], np.int32)
    length = int(lens.max()) + new_tokens
    state = functional.init_state(params, len(prompts), length)
    state = jit_admit(
        params, state, np.arange(len(prompts)), padded(prompts, int(lens.max())), lens,
        sampling=sampling, max_lens=lens + new_tokens, stop_token_ids=stop_token_ids,
    )  # fmt: skip
    texts: list[list[int]] = [[] for _ in prompts]

    def collect(emitted: Any) -> None:
        tokens, counts = np.asarray(emitted.tokens[0]), np.asarray(emitted.counts[0])
        for row, text in enumerate(texts):
            new = tokens[row, : counts[row]].tolist()
            text.extend(new)
            take(row, new)

    width = int(lens.max())
    state, emitted = jit_prefill(params, state, width=width, greedy=greedy, masks=masks(None))
    collect(emitted)
    options: dict[str, Any] = dict(shape=shape, greedy=greedy)
    while (np.asarray(emitted.status) == Status.DECODING).any():
        state, tree = jit_draft(params, state, **options)
        state, emitted = jit_verify(params, state, tree, masks(tree), **options)
        collect(emitted)
    return texts, state


def bigram_words(vocab: int, seed: int = 0) -> np.ndarray:
    """Which tokens may follow each token, about a third of them: uint32 [V, ceil(V / 32)]."""
    allowed = np.random.default_rng(seed).random((vocab, vocab)) < 0.35
    return packed(allowed)


def packed(allowed: np.ndarray) -> np.ndarray:
    """bool [..., V] as mask words."""
    padding = [(0, 0)] * (allowed.ndim - 1) + [(0, -allowed.shape[-1] % 32)]
    bits = np.packbits(np.pad(allowed, padding), axis=-1, bitorder="little")
    return bits.view(np.uint32)


def is_allowed(words: np.ndarray, token: int) -> bool:
    return bool(words[token >> 5] >> np.uint32(token & 31) & 1)


def bigram_masks(words: np.ndarray, prompts: list[np.ndarray]) -> Mask:
    def masks(tree: Any) -> np.ndarray:
        before: Any = [prompt[-1] for prompt in prompts] if tree is None else tree.tokens
        return words[np.asarray(before, np.int32)]

    return masks
