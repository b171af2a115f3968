"""Samples of prompts in one call: rollouts, as a pure function."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.config.checks import check_count
from jaxspec.decoding.functional.admission import admit
from jaxspec.decoding.functional.checks import check_params
from jaxspec.decoding.functional.decode import decode
from jaxspec.decoding.functional.params import EngineParams
from jaxspec.decoding.functional.rows import init_state
from jaxspec.decoding.functional.shared_prompts import shared_pages
from jaxspec.decoding.functional.verify_prefix import verify_prefix
from jaxspec.decoding.functional.whole_prompts import prefill_all
from jaxspec.decoding.sampling import Sampling
from jaxspec.decoding.state import Emitted, EngineState
from jaxspec.parallel import check_divides
from jaxspec.parallel.array_checks import ArrayProblems, Integers, as_array, checked_texts, integers
from jaxspec.parallel.pytree import Pytree, array, pytree, static

PAGE_SIZE = 16
MOST_READ = 256  # prompt tokens of a row that are read at a time


@pytree
class Samples(Pytree):
    """S samples of each of B prompts. What is of tokens is laid out alike, [B, S, T]: the prompt
    from column 0 on, the generated tokens right after it, zeros to the end.

    T is the columns of the prompts and the most new tokens. ``tokens`` and ``lengths``, reshaped to
    [B * S, T] and [B * S], are what token_logprobs takes.

    Attributes:
      mask: the generated tokens, with the stop token if one ended the text.
      logprobs: of the generated tokens, under the model's raw logits.
      policy_logprobs: the same as they were sampled: after temperature, top-k, top-p and min-p.
      lengths: tokens, prompt included.
      ending: why a text ended, an Ending: STOP, LENGTH, or an error.
      rounds: of its decoding, each one pass of the target.
      prompt_columns: those of the prompts that were given.
    """

    tokens: Array = array("batch", "sequences", "length")  # int32 [B, S, T]
    mask: Array = array("batch", "sequences", "length")  # bool [B, S, T]
    logprobs: Array = array("batch", "sequences", "length")  # float32 [B, S, T]
    policy_logprobs: Array = array("batch", "sequences", "length")  # float32 [B, S, T]
    lengths: Array = array("batch", "sequences")  # int32 [B, S]
    seeds: Array = array("batch", "sequences")  # uint32 [B, S]
    ending: Array = array("batch", "sequences")  # int32 [B, S]
    rounds: Array = array("batch", "sequences")  # int32 [B, S]
    prompt_lens: Array = array("batch")  # int32 [B]
    prompt_columns: int = static()


def sample(
    params: EngineParams,
    prompts: Integers,
    lengths: Integers,
    sampling: Sampling,
    *,
    num_samples: int = 1,
    new_tokens: int,
    stop_token_ids: Integers = (),
    drafts: Integers | None = None,
    draft_lens: Integers | None = None,
) -> Samples:
    """Samples of prompts, to their ends: a pure function, for ``jit``, ``scan`` and ``vmap``.

    In float32 and under the matching rule a sample is a function of weights, prompt, policy and
    seed: the text that an Engine gives for the same, with any drafter and in any batch.

    The samples of a prompt share the pages that it fills, so it is read once; the rest of it, less
    than a page, is read for each. With recurrent layers each reads all of it.

    Args:
      prompts: integers [B, P]; of a row the first ``lengths`` are the prompt.
      lengths: integers [B], 1 to P.
      sampling: of B * S rows, the samples of a prompt next to each other: make_sampling(B * S,
        seeds=group_seeds(...).reshape(-1), ...). Or of B rows: further samples of a prompt have the
        seeds after its own.
      num_samples: S, of each prompt.
      new_tokens: most tokens to generate of each.
      stop_token_ids: ids that end a text: see admit. By default none does.
      drafts: integers [B, S, N], for each sample an old text without its prompt, of which the first
        ``draft_lens`` [B, S] are read and kept as far as the target writes the same (see
        verify_prefix): the samples do not depend on it. Give both or neither.

    Memory is allocated in the call, and free after it. On a mesh the prompts are split over its
    data axis.

    Raises ValueError for other shapes and dtypes, sizes below 1, known values out of range (of
    traced ones the text ends with an error: see ``ending``), and more positions than the model has.
    """
    check_params(params)
    check_count("num_samples", num_samples)
    check_count("new_tokens", new_tokens)
    tokens, lens = checked_texts(
        params.target.config.vocab_size, 1, prompts=prompts, lengths=lengths
    )
    assert lens is not None
    batch, columns = tokens.shape
    check_divides("the number of prompts", batch, params.data_parallel)
    sampling = _of_samples(sampling, batch, num_samples)
    rows = np.arange(batch * num_samples, dtype=np.int32)
    sizes = columns, num_samples, new_tokens
    pages = shared_pages(params, lens, sizes, PAGE_SIZE)
    row_lens = jnp.repeat(lens, num_samples)
    stops = as_array(stop_token_ids)
    if stops.ndim > 1:  # of each prompt
        stops = jnp.repeat(stops, num_samples, axis=0)
    state = init_state(
        params,
        len(rows),
        columns + new_tokens,
        page_size=PAGE_SIZE,
        page_table=pages.table,
        num_pages=pages.num_pages,
        max_stops=stops.shape[-1],
    )
    state = admit(
        params,
        state,
        rows,
        jnp.repeat(tokens, num_samples, axis=0),
        row_lens,
        sampling=sampling,
        max_lens=row_lens + new_tokens,
        stop_token_ids=stops,
        cached_lens=pages.cached_lens,
    )
    state, calls = _generated(params, state, sizes, _drafts_of(drafts, draft_lens, batch, sizes))
    return _samples(state, calls, sampling.seeds, sizes)


def _generated(
    params: EngineParams,
    state: EngineState,
    sizes: tuple[int, int, int],
    drafts: tuple[Array, Array] | None,
) -> tuple[EngineState, list[tuple[np.ndarray, Emitted]]]:
    """The state at the end of all rows, and what each call emitted, with its rows [n]."""
    columns, samples, new = sizes
    rows = np.arange(len(state.rows.status), dtype=np.int32)
    reads = [(rows, columns)]
    if samples > 1 and not params.target.config.is_recurrent:
        is_first = rows % samples == 0
        rest = PAGE_SIZE + params.drafter.num_reread_tokens
        reads = [(rows[is_first], columns), (rows[~is_first], min(rest, columns))]
    calls = list[tuple[np.ndarray, Emitted]]()
    ask: dict[str, Any] = {"logprobs": True, "policy_logprobs": True}
    for listed, width in reads:
        if drafts is None:
            width = min(width, MOST_READ)
            state, emitted = prefill_all(params, state, listed, width=width, **ask)
        else:
            tokens, lens = (x[listed] for x in drafts)
            width = min(width + tokens.shape[1], MOST_READ)
            state, emitted = verify_prefix(params, state, listed, tokens, lens, width=width, **ask)
        calls.append((listed, emitted))
    if new > 1:
        state, emitted = decode(params, state, new - 1, **ask)
        calls.append((rows, emitted))
    return state, calls


def _drafts_of(
    drafts: Integers | None, lens: Integers | None, batch: int, sizes: tuple[int, int, int]
) -> tuple[Array, Array] | None:
    """Drafts [B * S, N] and their lengths [B * S], cut to the new tokens. Raises ValueError for
    other shapes and dtypes."""
    if drafts is None and lens is None:
        return None
    if drafts is None or lens is None:
        raise ValueError("give drafts and draft_lens together, or neither")
    _, samples, new = sizes
    tokens, lens = integers("drafts", drafts, "[B, S, N]"), integers("draft_lens", lens, "[B, S]")
    if (*tokens.shape[:2], *lens.shape) != (batch, samples) * 2:
        raise ValueError(
            f"drafts and draft_lens have shapes {list(tokens.shape)} and {list(lens.shape)} for "
            f"{batch} prompts of {samples} samples: give [{batch}, {samples}, N] and "
            f"[{batch}, {samples}]"
        )
    problems = ArrayProblems()
    most = tokens.shape[2]
    problems.within("draft_lens", lens, lambda x: (x >= 0) & (x <= most), f"drafts have {most}")
    problems.raise_all()
    tokens = jnp.asarray(tokens).reshape(batch * samples, most)[:, :new]
    return tokens, jnp.minimum(jnp.asarray(lens).reshape(-1), tokens.shape[1])


def _samples(
    state: EngineState,
    calls: list[tuple[np.ndarray, Emitted]],
    seeds: Array,
    sizes: tuple[int, int, int],
) -> Samples:
    columns, samples, new = sizes
    rows, length = state.rows, columns + new
    ends = rows.prompt_lens  # of the tokens so far
    placed = [jnp.zeros((len(ends), length), jnp.float32)] * 2
    for index, emitted in calls:
        counts = jnp.cumsum(emitted.counts, axis=0)  # [C, n]
        offset = jnp.arange(emitted.tokens.shape[2])
        place = (ends[index] + counts - emitted.counts)[..., None] + offset
        place = jnp.where(offset < emitted.counts[..., None], place, length)
        values = emitted.logprobs, emitted.policy_logprobs
        at = index[None, :, None], place
        placed = [old.at[at].set(x, mode="drop") for old, x in zip(placed, values, strict=True)]
        ends = ends.at[index].add(counts[-1])
    place = jnp.arange(length)

    def grouped(x: Array) -> Array:
        return x.reshape(-1, samples, *x.shape[1:])

    fields: dict[str, Any] = {
        "tokens": jnp.where(place < ends[:, None], rows.tokens[:, :length], 0),
        "mask": (place >= rows.prompt_lens[:, None]) & (place < ends[:, None]),
        "logprobs": placed[0],
        "policy_logprobs": placed[1],
        "lengths": ends,
        "seeds": seeds,
        "ending": rows.ending,
        "rounds": rows.stats.rounds,
    }
    return Samples(
        **jax.tree.map(grouped, fields),
        prompt_lens=rows.prompt_lens[::samples],
        prompt_columns=columns,
    )


def _of_samples(sampling: Sampling, batch: int, samples: int) -> Sampling:
    """The sampling of all rows. Raises ValueError for sampling of other sizes."""
    if not isinstance(sampling, Sampling):
        kind = type(sampling).__name__
        raise ValueError(f"sampling must be what make_sampling gives, not {kind}")
    sizes = {leaf.shape for leaf in jax.tree.leaves(sampling)}
    if sizes == {(batch * samples,)}:
        return sampling
    if sizes != {(batch,)}:
        found = sorted(map(list, sizes))[0]
        raise ValueError(
            f"sampling has shape {found} for {batch} prompts of {samples} samples: "
            f"make_sampling({batch * samples}, ...)"
        )
    rows = jax.tree.map(lambda x: jnp.repeat(x, samples), sampling)
    after = jnp.tile(jnp.arange(samples, dtype=jnp.uint32), batch)
    return rows.replace(seeds=rows.seeds + after)
