"""Export of a trained head: a folder with weights, training curves and a model card."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxspec.checkpoints.block import save_block_head
from jaxspec.checkpoints.eagle import save_eagle_head
from jaxspec.checkpoints.mtp import save_mtp_head
from jaxspec.config.model import ModelConfig
from jaxspec.models.heads import BlockHead, mtp_states
from jaxspec.models.heads.corrections import PairCorrection
from jaxspec.training.heads.data import ExampleReport
from jaxspec.training.heads.run import DraftRecord, DraftTraining
from jaxspec.training.heads.step import Head
from jaxspec.training.lm.model import num_parameters
from jaxspec.training.precision import cast_weights
from jaxspec.training.report import Card, write_report


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftCard(Card):
    """``coverage``: the share of learned tokens that are in the draft vocabulary."""

    target: str
    coverage: float
    report: ExampleReport


def export_head(
    run: DraftTraining,
    target: ModelConfig,
    hf_config: Mapping[str, Any],
    card: DraftCard,
    directory: Path,
) -> None:
    """Write the head in the official layout (bfloat16 safetensors, config.json), with log.jsonl,
    training.png and README.md. Files of these names in an existing folder are replaced.

    ``hf_config``: the contents of the target's ``config.json``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weights = cast_weights(run.head, jnp.bfloat16)
    if isinstance(weights, BlockHead):
        save_block_head(weights, directory, cast_weights(run.target, jnp.bfloat16))
    elif weights.method == "mtp":
        save_mtp_head(weights, directory, hf_config)
    else:
        save_eagle_head(weights, directory, target)
    metrics, picture = {"loss": "log", "accuracy": "linear"}, directory / "training.png"
    write_report(run.records, directory / "log.jsonl", metrics, picture, head_card(run, card))


def head_card(run: DraftTraining, card: DraftCard) -> str:
    """The README.md of an exported head, in Markdown."""
    head, config, last = run.head, run.config, run.records[-1]
    evaluated = next(r for r in reversed(run.records) if r.held_out_accuracy is not None)
    layer = head.config.layers[0]
    vocabulary, coverage = _vocabulary(head), f"{card.coverage:.2%} of the learned tokens"
    return f"""# {card.name}

A {num_parameters(head) / 1e6:.2f} M parameter {head.method.upper()} draft head for {card.target},
trained by jaxspec's `scripts/train_drafter.py`. It drafts what that model is about to write; by
itself it generates nothing.

| | |
|---|---|
| reads | {_read(head)} |
| layer | {head.config.num_layers} of hidden {head.config.hidden_size}, \
{layer.attention.heads}, \
SwiGLU of {layer.units} |
| draft vocabulary | {vocabulary}, {coverage} |
| training | {last.step} steps of {config.batch_size} rows = {last.tokens / 1e6:.1f} M tokens, \
{config.loss.described}, AdamW, learning rate {config.learning_rate:g}, \
seed {config.seed} |
| data | {card.report} |
| time | {last.seconds:.0f} s on {card.device} |

Held-out rows after step {evaluated.step}, on condition that the earlier tokens of the draft were
right (accuracy: the likeliest token is the target's; overlap: sum of min(p, q)){_note(evaluated)}:

{_table(evaluated)}

```
{card.command}
```

![training](training.png)

## Licence

{card.license_note}
"""


def _read(head: Head) -> str:
    """The hidden states that a head reads."""
    if isinstance(head, BlockHead) or head.method != "mtp":
        return f"hidden states {list(head.capture)} of the target"
    states = mtp_states(head)
    target, layer = (
        "after" if normed else "before" for normed in (states.target_normed, states.draft_normed)
    )
    return (
        f"the target's hidden state {target} its final norm, then the layer's own {layer} its norm "
        f"(`{states.name}`)"
    )


def _vocabulary(head: Head) -> str:
    """The tokens that a head drafts."""
    if isinstance(head, BlockHead) and isinstance(head.correction, PairCorrection):
        return f"the target's (chooses among {head.correction.candidates} candidates of each depth)"
    ids = None if isinstance(head, BlockHead) else head.token_ids
    return "the target's" if ids is None else f"{ids.shape[0]} tokens"


def _note(record: DraftRecord) -> str:
    if record.held_out_confidence is None:
        return ""
    return (
        ",\nand what the confidence head expects the overlap to be, with its mean distance from it"
    )


def _table(record: DraftRecord) -> str:
    """The held-out figures of each step, in Markdown."""
    columns = {
        "step": [str(step) for step in range(1, 1 + len(record.held_out_loss or []))],
        "loss": [f"{loss:.4f}" for loss in record.held_out_loss or []],
    }
    shares = {
        "accuracy": record.held_out_accuracy,
        "overlap": record.held_out_overlap,
        "confidence": record.held_out_confidence,
        "its error": record.held_out_confidence_error,
    }
    columns |= {
        name: [f"{share:.1%}" for share in values] for name, values in shares.items() if values
    }
    rows = [tuple(columns), ("---",) * len(columns), *zip(*columns.values(), strict=True)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
