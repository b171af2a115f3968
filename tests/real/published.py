"""Models that come as packages, as transformers reads and computes them in float32."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from jaxspec import Completion
from jaxspec.checkpoints.packaged import packaged_file


def model_file(name: str) -> Path:
    """The GGUF file of a packaged model. Skips the test if it is not installed."""
    try:
        return packaged_file(name)
    except ValueError as error:
        pytest.skip(str(error))


@functools.cache
def reference(name: str) -> Any:
    path = model_file(name)
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@torch.no_grad()
def logits_of(name: str, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Logits [T, V] after each token of each text, of one pass over all. Padding comes after the
    texts, where nothing sees it."""
    rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], True)
    found = reference(name)(rows).logits.numpy()
    return [logits[: len(text)] for logits, text in zip(found, texts, strict=True)]


def check_completions(name: str, completions: Sequence[Completion]) -> None:
    """Every token has the highest logit after those before it, and the log-probabilities of
    prompts are within 2e-4."""
    texts = [[*found.prompt_token_ids, *found.token_ids] for found in completions]
    for found, logits in zip(completions, logits_of(name, texts), strict=True):
        first = len(found.prompt_token_ids) - 1
        chosen = logits[first:-1].argmax(-1).tolist()
        assert chosen == list(found.token_ids), found.text
        assert found.prompt_logprobs is not None
        wanted = torch.log_softmax(torch.from_numpy(logits[:first]), -1).numpy()
        for row, entry in zip(wanted, found.prompt_logprobs[1:], strict=True):
            assert entry is not None
            tokens = [token for token, _ in entry.top]
            np.testing.assert_allclose([value for _, value in entry.top], row[tokens], atol=2e-4)
