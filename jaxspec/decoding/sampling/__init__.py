"""From logits to tokens.

The logits of each tree node go through, in this order (that of vLLM and transformers): bias, with
allowed and bad tokens; bad sequences of tokens; the minimum number of tokens; repetition, frequency
and presence penalties (``controls``); the ends of budgets of reasoning (``budgets``); temperature,
top-k, top-p, min-p, and the noise that draws a token (``logits``).
"""

from jaxspec.decoding.sampling.budgets import make_budgets
from jaxspec.decoding.sampling.controls import (
    Controls,
    control_logits,
    make_controls,
    with_budgets,
)
from jaxspec.decoding.sampling.history import History
from jaxspec.decoding.sampling.logits import (
    Sampling,
    make_sampling,
    perturb,
    probabilities,
    process_logits,
    vocab_ids,
)
from jaxspec.decoding.sampling.logprobs import Logprobs, policy_logprobs, token_logprobs

__all__ = [
    "Controls",
    "History",
    "Logprobs",
    "Sampling",
    "control_logits",
    "make_budgets",
    "make_controls",
    "make_sampling",
    "perturb",
    "policy_logprobs",
    "probabilities",
    "process_logits",
    "token_logprobs",
    "vocab_ids",
    "with_budgets",
]
