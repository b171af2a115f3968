"""From logits to tokens.

The logits of each tree node go through, in this order (that of vLLM and transformers): bias, with
allowed and bad tokens; the minimum number of tokens; repetition, frequency and presence penalties
(``controls``); temperature, top-k, top-p, min-p, and the noise that draws a token (``logits``).
"""

from jaxspec.decoding.sampling.controls import Controls, History, control_logits, make_controls
from jaxspec.decoding.sampling.logits import (
    Sampling,
    make_sampling,
    perturb,
    probabilities,
    process_logits,
    vocab_ids,
)
from jaxspec.decoding.sampling.logprobs import Logprobs, token_logprobs

__all__ = [
    "Controls",
    "History",
    "Logprobs",
    "Sampling",
    "control_logits",
    "make_controls",
    "make_sampling",
    "perturb",
    "probabilities",
    "process_logits",
    "token_logprobs",
    "vocab_ids",
]
