"""How Qwen3.8-Flash-Next hashes n-grams to rows of a table: sizes of heads and multipliers, which
follow from numbers of the config."""

import math
from typing import Any

from jaxspec.config.ngrams import NgramConfig
from jaxspec.models.families.family import Keys
from jaxspec.models.json.values import is_integer, shown

FLOAT8 = "float8_e4m3fn"  # tables of quantized files
_WORD, _LONGEST = (1 << 64) - 1, (1 << 63) - 1
# Of the generator splitmix64 (Steele, Lea, Flood, 2014), and the step between layers' seeds.
_GAMMA, _FACTORS, _SHIFTS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB), (30, 27)
_BETWEEN_LAYERS = 10007


def ngrams_of(hf: Keys, index: int) -> NgramConfig:
    """The n-grams of the layer that is number ``index`` of those that have some.

    Raises ValueError for sizes that do not fit, and for a config without a token that ends texts.
    """
    tokens, heads = hf["ngram_size"], hf["heads_per_ngram"]
    width, count = hf["ple_embed_dim"] or hf["hidden_size"], (tokens - 1) * heads
    if not count or width % count:
        raise ValueError(
            f"ple_embed_dim ({width}) must be a multiple of the heads of all n-grams ({count})"
        )
    eos = hf["eos_token_id"]
    end: Any = eos[0] if isinstance(eos, list) and eos else eos
    if not is_integer(end):
        raise ValueError(f"eos_token_id must name a token that ends n-grams, got {shown(eos)}")
    sizes = _primes_from(hf["ngram_vocab_size_base"], (index + 1) * count)[-count:]
    padded = hf["make_ngram_vocab_size_divisible_by"]
    return NgramConfig(
        multipliers=_multipliers(hf["vocab_size"], tokens, hf["seed"], index),
        sizes=tuple(sizes),
        end=end,
        width=width // count,
        rows=-(-sum(sizes) // padded) * padded,
        parts=hf["split_ngram_parts"],
        taps=hf["ple_conv_kernel_size"],
        float8=hf["ple_embedding_dtype"] == FLOAT8,
    )


def _multipliers(vocab: int, count: int, seed: int, index: int) -> tuple[int, ...]:
    """Odd numbers that no product with a token id makes longer than 63 bits."""
    most = max(1, _LONGEST // vocab // 2)
    start = seed + _BETWEEN_LAYERS * index
    return tuple(2 * (_mixed(start + _GAMMA * place) % most) + 1 for place in range(1, count + 1))


def _mixed(state: int) -> int:
    """The number of 64 bits that splitmix64 makes of a state."""
    value = (state + _GAMMA) & _WORD
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=True):
        value = ((value ^ (value >> shift)) * factor) & _WORD
    return value ^ (value >> 31)


def _primes_from(first: int, count: int) -> list[int]:
    """So many primes, the smallest that are not below ``first``."""
    found = list[int]()
    number = max(first, 2)
    while len(found) < count:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            found.append(number)
        number += 1
    return found
