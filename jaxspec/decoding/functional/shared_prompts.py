"""Rows that sample one prompt several times share the pages that it fills."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxspec.config.cache import pages_for
from jaxspec.decoding.functional.params import EngineParams


class SharedPages(NamedTuple):
    """Page tables of B * S rows, the samples of a prompt one after the other."""

    table: Array  # int32 [B * S, M]
    cached_lens: Array  # int32 [B * S]: tokens that a row need not read, as the prompt's first does
    num_pages: int  # of the pool, null pages included


def shared_pages(
    params: EngineParams,
    lengths: Array,  # int32 [B], which may be traced
    sizes: tuple[int, int, int],  # columns of the prompts, samples of each, new tokens
    page_size: int,
) -> SharedPages:
    """Pages that a prompt fills are there once; each row has pages of its own for what follows.

    At least one token of a prompt is in pages of each row: so each samples what comes after it.
    Pages of recurrent layers do not hold all of a prompt: there all rows read it.
    """
    columns, samples, new = sizes
    shares = samples > 1 and not params.target.config.is_recurrent
    shards, scratch = params.data_parallel, params.speculation.scratch_slots
    most_shared = (columns - 1) // page_size if shares else 0
    rest = page_size if shares else columns
    private = pages_for(rest + new + scratch, page_size)
    width = max(most_shared + private, pages_for(columns + new + scratch, page_size))
    prompts = len(lengths) // shards  # of a device, which has pages from 0 on
    prompt = (jnp.arange(len(lengths)) % prompts)[:, None, None]  # [B, 1, 1]
    row = prompt * samples + jnp.arange(samples)[:, None]  # [B, S, 1]
    full = jnp.clip((lengths - 1) // page_size, 0, most_shared)[:, None, None]
    page = jnp.arange(width)
    unshared = 1 + prompts * most_shared + row * private + page - full
    unshared = jnp.where(page - full < private, unshared, 0)
    table = jnp.where(page < full, 1 + prompt * most_shared + page, unshared).reshape(-1, width)
    cached = jnp.where(jnp.arange(samples) == 0, 0, full[..., 0] * page_size).reshape(-1)
    num_pages = shards * (1 + prompts * (most_shared + samples * private))
    return SharedPages(table.astype(jnp.int32), cached.astype(jnp.int32), num_pages)
