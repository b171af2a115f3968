"""Decoding token by token, with transformers' logits processors and this package's noise."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from jax import Array

from jaxspec.config.reasoning import ReasoningBudget
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.decoding.sampling.noise import Stream, gumbel
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import Decoder
from tests.helpers.programs import FAST_COMPILE


class OutputPenalties(transformers.LogitsProcessor):
    """OpenAI's presence and frequency penalties, which transformers does not have."""

    def __init__(self, prompt_len: int, presence: float, frequency: float):
        self.prompt_len, self.presence, self.frequency = prompt_len, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        output = input_ids[0, self.prompt_len :].numpy()
        counts = np.bincount(output, minlength=scores.shape[1]).astype(np.float32)
        penalty = np.float32(self.frequency) * counts + np.float32(self.presence) * (counts > 0)
        return scores - torch.from_numpy(penalty)[None]


class Budget(transformers.LogitsProcessor):
    """A budget of reasoning: what comes next once it is spent."""

    def __init__(self, prompt_len: int, budget: ReasoningBudget):
        self.prompt_len, self.budget = prompt_len, budget

    def forced(self, output: list[int]) -> int | None:
        """The only token that may come after these of the text, if there is one."""
        budget, inside, since = self.budget, self.budget.inside, 0
        begin, end, place = list(budget.begin), list(budget.end), 0
        while place < len(output):
            marker = end if inside else begin
            if marker and output[place : place + len(marker)] == marker:
                if inside and not budget.repeats:
                    return None
                inside, place = not inside, place + len(marker)
                since = place
            else:
                place += 1
        if not inside or len(output) - since < budget.tokens:
            return None
        rest = output[since:]
        sizes = range(min(len(end) - 1, len(rest)), -1, -1)
        return next(end[n] for n in sizes if rest[len(rest) - n :] == end[:n])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = self.forced(input_ids[0, self.prompt_len :].tolist())
        if token is None:
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, token] = scores[:, token]
        return forced


class BadSequences(transformers.LogitsProcessor):
    """transformers' NoBadWordsLogitsProcessor, of the output alone."""

    def __init__(self, prompt_len: int, sequences: Sequence[tuple[int, ...]]):
        self.prompt_len = prompt_len
        words: Any = [list(sequence) for sequence in sequences]
        self.inner = transformers.NoBadWordsLogitsProcessor(words, eos_token_id=None)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids: Any = input_ids[:, self.prompt_len :]
        values: Any = scores
        return self.inner(ids, values)


def processors(params: SamplingParams, prompt_len: int) -> transformers.LogitsProcessorList:
    """In the order that SamplingParams gives. Those that change nothing are left out."""
    chain: list[transformers.LogitsProcessor] = []
    if params.logit_bias:
        bias: Any = {(token,): float(value) for token, value in dict(params.logit_bias).items()}
        chain.append(transformers.SequenceBiasLogitsProcessor(bias))
    if params.allowed_token_ids is not None:
        allowed = list(params.allowed_token_ids)
        chain.append(transformers.PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, 1))
    if params.bad_token_ids:
        chain.append(transformers.SuppressTokensLogitsProcessor(list(params.bad_token_ids)))
    if params.bad_sequences:
        chain.append(BadSequences(prompt_len, params.bad_sequences))
    if params.min_tokens and params.stop_token_ids:
        stops = list(params.stop_token_ids)
        chain.append(
            transformers.MinNewTokensLengthLogitsProcessor(prompt_len, params.min_tokens, stops)
        )
    if params.repetition_penalty != 1:
        chain.append(transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        penalties = params.presence_penalty, params.frequency_penalty
        chain.append(OutputPenalties(prompt_len, *penalties))
    if params.reasoning_budget is not None:
        chain.append(Budget(prompt_len, params.reasoning_budget))
    if params.temperature > 0:
        chain.append(transformers.TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            chain.append(transformers.TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            chain.append(transformers.TopPLogitsWarper(params.top_p))
        if params.min_p:
            chain.append(transformers.MinPLogitsWarper(params.min_p))
    return transformers.LogitsProcessorList(chain)


@functools.partial(jax.jit, compiler_options=FAST_COMPILE)
def plain_logits(target: Decoder, tokens: Array) -> Array:
    """Raw logits after every token, by a dense pass: int32 [B, S] -> [B, S, V]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    states = target.no_states()
    hidden, _, _ = decoder.run(target, tokens, positions, states, dense_causal_attend)
    return decoder.logits(target, hidden)


@functools.partial(jax.jit, static_argnums=(1, 2), compiler_options=FAST_COMPILE)
def target_noise(seeds: Array, length: int, vocab: int) -> Array:
    """[B] -> [B, length, V]"""
    return gumbel(seeds, Stream.TARGET, jnp.arange(length)[None], jnp.arange(vocab))


def reference_texts(
    target: Decoder,
    prompts: Sequence[np.ndarray],
    sampling: Sequence[SamplingParams],
    length: int,
    guesses: Sequence[Sequence[int]] = (),
) -> list[list[int]]:
    """Prompts and what plain decoding writes after them, at most ``length`` tokens each.

    ``guesses`` are whole texts, prompts included. They change nothing: one pass gives the logits
    after every token of a guess, and they are used as far as the guess is right.
    """
    texts = [prompt.tolist() for prompt in prompts]
    chains = [processors(params, len(text)) for params, text in zip(sampling, texts, strict=True)]
    limits = [
        min(length, len(text) + params.max_tokens)
        for params, text in zip(sampling, texts, strict=True)
    ]
    seeds = np.array([params.seed or 0 for params in sampling], np.uint32)
    noise = np.asarray(target_noise(seeds, length, target.config.vocab_size))
    done = [False] * len(texts)
    while not all(done):
        read = [
            list(guess) if list(guess[: len(text)]) == text else text.copy()
            for guess, text in zip(guesses or texts, texts, strict=True)
        ]
        tokens = np.zeros((len(texts), length), np.int32)
        for row, text in enumerate(read):
            tokens[row, : len(text)] = text
        logits = np.asarray(plain_logits(target, tokens))
        for row, (text, params) in enumerate(zip(texts, sampling, strict=True)):
            right = True
            while right and not done[row]:
                place = len(text)
                ids: Any = torch.tensor([text])
                raw: Any = torch.from_numpy(logits[row, place - 1][None].copy())
                scores = chains[row](ids, raw).numpy()[0]
                chosen = scores + noise[row, place] if params.temperature else scores
                text.append(int(np.argmax(chosen)))
                stopped = text[-1] in (params.stop_token_ids or ())
                done[row] = stopped or len(text) == limits[row]
                right = read[row][place : place + 1] == text[-1:]
    return texts
