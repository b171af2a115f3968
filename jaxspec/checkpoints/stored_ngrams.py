"""What the files of a checkpoint say about the hashes of n-grams: the numbers that follow from
config.json, which files may repeat."""

from collections.abc import Mapping
from itertools import accumulate

import numpy as np

from jaxspec.config.model import ModelConfig
from jaxspec.models.tensors import CheckpointTensor


def ngram_numbers(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The values of tensors that a checkpoint may have, by name."""
    values = dict[str, tuple[int, ...]]()
    for index, layer in enumerate(config.layers):
        ngrams, module = layer.ngrams, f"model.layers.{index}.ple.ple_embedding."
        if ngrams is not None:
            values[f"{module}layer_multipliers"] = ngrams.multipliers
            values[f"{module}ngram_heads_vocab_sizes"] = ngrams.sizes
            values[f"{module}ngram_heads_offsets"] = (0, *accumulate(ngrams.sizes[:-1]))
    return values


def check_stored_ngrams(config: ModelConfig, stored: Mapping[str, CheckpointTensor]) -> None:
    """Raise ValueError for stored numbers that are others than those of the config."""
    for name, wanted in ngram_numbers(config).items():
        tensor = stored.get(name)
        if tensor is not None and not np.array_equal(np.asarray(tensor.read()), wanted):
            raise ValueError(
                f"{tensor.file.name}: {tensor.name} has other numbers than follow from "
                "config.json, of seed, vocab_size and ngram_vocab_size_base"
            )
