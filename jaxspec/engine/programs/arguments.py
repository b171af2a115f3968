"""What an engine's programs take: an empty state, requests as arrays, and static options."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.config.sampling_params import MOST_LOGPROBS, SamplingParams
from jaxspec.decoding.functional import EngineParams, init_state
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.sampling import (
    Controls,
    Sampling,
    make_budgets,
    make_controls,
    with_budgets,
)
from jaxspec.decoding.state import EngineState
from jaxspec.engine.programs.sizes import Kind, ReadKey, RoundsKey, Sizes, VerifyKey
from jaxspec.engine.programs.undrafted import without_drafter


def empty_state(params: EngineParams, sizes: Sizes) -> EngineState:
    """An empty state of these sizes, without controls."""
    return init_state(
        params,
        sizes.num_rows,
        sizes.max_length,
        page_size=sizes.page_size,
        page_table=jnp.zeros((sizes.num_rows, sizes.columns), jnp.int32),
        num_pages=sizes.num_pages,
        max_stops=sizes.max_stops,
    )


@dataclasses.dataclass(frozen=True)
class NewRow:
    """A request to be admitted; see functional.admit.

    Attributes:
      prompt: what it reads; tokens after the first ``request_prompt_len`` are its output so far.
    """

    row: int
    prompt: Sequence[int]
    max_len: int
    sampling: SamplingParams
    stop_token_ids: Sequence[int]
    request_prompt_len: int
    table: Sequence[int]
    cached: int = 0

    @property
    def has_controls(self) -> bool:
        return self.sampling.needs_controls


def empty_prompts(rows: Sequence[int], sampling: SamplingParams) -> list[NewRow]:
    """Requests that are done at once, since they have no pages."""
    sampling = dataclasses.replace(sampling, seed=0)
    return [NewRow(row, (0,), 1, sampling, (), 1, ()) for row in rows]


def admission(
    rows: Sequence[NewRow], size: int, sizes: Sizes, columns: int
) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    """Arguments and options of functional.admit for ``size`` rows; the rest is padding."""
    padded = [*rows, *[rows[-1]] * (size - len(rows))]
    prompts = np.zeros((size, sizes.max_length), np.int32)
    stops = np.full((size, sizes.max_stops), -1, np.int32)
    table = np.zeros((size, columns), np.int32)
    for place, new in enumerate(padded):
        prompts[place, : len(new.prompt)] = new.prompt
        stops[place, : len(new.stop_token_ids)] = new.stop_token_ids
        table[place, : len(new.table)] = new.table
    lens = np.array([len(new.prompt) for new in padded], np.int32)
    sampling = Sampling(  # of arrays of numpy: make_sampling would compile a program for each
        temperature=_values(padded, "temperature", np.float32),
        top_k=_values(padded, "top_k", np.int32),
        top_p=_values(padded, "top_p", np.float32),
        min_p=_values(padded, "min_p", np.float32),
        seeds=_values(padded, "seed", np.uint32),
    )
    options = {
        "sampling": sampling,
        "max_lens": np.array([new.max_len for new in padded], np.int32),
        "stop_token_ids": stops,
        "page_table": table,
        "cached_lens": np.array([new.cached for new in padded], np.int32),
    }
    return (sizes.padded([new.row for new in rows], size), prompts, lens), options


def new_controls(
    rows: Sequence[NewRow], size: int, sizes: Sizes, params: EngineParams
) -> tuple[np.ndarray, Controls]:
    """Arguments of functional.set_controls for ``size`` rows; the rest is padding."""
    padded, vocab = [*rows, *[rows[-1]] * (size - len(rows))], params.target.config.vocab_size
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    controls = make_controls(
        size,
        vocab,
        bias=np.stack([new.sampling.dense_bias(vocab) for new in padded]),
        prompt_lens=np.array([new.request_prompt_len for new in padded], np.int32),
        min_tokens=_values(padded, "min_tokens", np.int32),
        bad_sequences=np.stack([new.sampling.bad_sequence_table() for new in padded]),
        **{name: _values(padded, name, np.float32) for name in names},
    )
    budgets = make_budgets([new.sampling.reasoning_budget for new in padded])
    return sizes.padded([new.row for new in rows], size), with_budgets(controls, budgets)


def program_options(
    params: EngineParams, sizes: Sizes, key: ReadKey | RoundsKey | VerifyKey
) -> RoundOptions:
    """The static options of a program that reads prompts, verifies old texts or runs rounds."""
    if not isinstance(key, VerifyKey) and key.undrafted:
        params = without_drafter(params)
    kind, shape = key.kind, key.shape if isinstance(key, RoundsKey) else None
    alternatives = min(MOST_LOGPROBS, params.target.config.vocab_size)
    options = dataclasses.replace(
        params.round_options(shape),
        columns=key.columns,
        greedy=kind is Kind.GREEDY,
        controls=kind.controls,
        logprobs=kind.controls,
        top_logprobs=alternatives if kind.controls else 0,
        policy_logprobs=kind >= Kind.POLICY,
    )
    if isinstance(key, ReadKey):
        options = dataclasses.replace(
            options,
            width=key.width,
            prompt_logprobs=kind is Kind.PROMPT,
            order_invariant=sizes.fixed,
        )
    elif isinstance(key, VerifyKey):
        options = dataclasses.replace(options, width=key.width)
    else:
        options = dataclasses.replace(
            options,
            max_rounds=key.rounds or sizes.max_rounds,
            fixed=key.rounds > 0,
            checked=False,
            trees=sizes.trees,
        )
    return params.checked_options(options)


def _values(rows: Sequence[NewRow], name: str, dtype: type) -> Any:
    return np.array([getattr(new.sampling, name) for new in rows], dtype)
