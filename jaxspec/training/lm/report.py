"""Export of a trained model: a folder with weights, tokenizer, loss curve and model card."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxspec.checkpoints.safetensors_io import save_decoder
from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import ModelConfig
from jaxspec.training.data import Report
from jaxspec.training.lm.model import num_parameters
from jaxspec.training.lm.run import Pretraining
from jaxspec.training.precision import cast_weights
from jaxspec.training.report import Card, write_report
from jaxspec.training.vocabulary import Owner


@dataclasses.dataclass(frozen=True, kw_only=True)
class LMCard(Card):
    """``sample``: a text that the model wrote."""

    sample: str


def export(
    run: Pretraining, card: LMCard, directory: Path, hf_config: Mapping[str, Any] | None = None
) -> None:
    """Write a HF folder: bfloat16 safetensors, configs, tokenizer, loss.jsonl, loss.png, README.

    transformers and vLLM open it. Files of these names in an existing folder are replaced.
    ``hf_config``: see save_decoder.
    """
    directory.mkdir(parents=True, exist_ok=True)
    save_decoder(cast_weights(run.params, jnp.bfloat16), directory, hf_config)
    vocabulary = run.corpus.vocabulary
    vocabulary.save(directory, run.model.max_position)
    end = vocabulary.end_of_text_id
    generation = {"do_sample": False, "eos_token_id": end, "pad_token_id": end}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    picture = directory / "loss.png"
    card_text = model_card(run, card)
    write_report(run.records, directory / "loss.jsonl", {"loss": "linear"}, picture, card_text)


def model_card(run: Pretraining, card: LMCard) -> str:
    """The README.md of an exported model, in Markdown."""
    model, config, last = run.model, run.config, run.records[-1]
    report = run.corpus.report
    evaluated = next(r for r in reversed(run.records) if r.held_out_loss is not None)
    epochs = last.tokens / report.train_tokens
    bytes_per_token = report.train_bytes / report.train_tokens
    owner = run.corpus.vocabulary.owner
    tokenizer = "byte-level BPE" if owner is None else f"that of {owner.name}"
    return f"""# {card.name}

A {num_parameters(run.params) / 1e6:.2f} M parameter language model of source code, trained from
scratch by jaxspec's `scripts/train_lm.py`. {_purpose(owner)}: it continues code
in the manner of its training text, and knows nothing else.

| | |
|---|---|
| architecture | {_architecture(model)} |
| tokenizer | {tokenizer}, {model.vocab_size} tokens, {bytes_per_token:.2f} bytes a token |
| training | {last.step} steps of {config.batch_size} x {config.context} tokens = \
{last.tokens / 1e6:.1f} M tokens ({epochs:.1f} passes), AdamW, learning rate \
{config.learning_rate:g}, seed {config.seed} |
| time | {last.seconds:.0f} s on {card.device} |
| held-out loss | **{evaluated.held_out_loss:.4f}** nats a token, \
**{evaluated.bits_per_byte:.4f}** bits a byte, after step {evaluated.step} |

## Data

{_data_table(report)}

{report.files} files in all, {report.train_tokens:,} training tokens. The {report.held_out_files} \
held-out files ({report.held_out_bytes / 1e6:.2f} MB, {report.held_out_tokens:,} tokens) are chosen
by the hash of their names. Exact copies are removed, near copies are not, so the held-out loss
flatters the model somewhat. Left out: {_skipped(report)}.

## Made by

```
{card.command}
```

![loss](loss.png)

## Sample (greedy; the first line or lines are the prompt)

```python
{card.sample}
```

## Licence

{card.license_note}
"""


def _purpose(owner: Owner | None) -> str:
    if owner is None:
        return "It is a small target for trying out and testing\nspeculative decoding"
    return f"It drafts for {owner.name},\nwhose tokenizer it has"


def _architecture(model: ModelConfig) -> str:
    tied = ", tied embeddings" if model.tie_word_embeddings else ""
    attention, mlp = model.layers[0].mixer, model.layers[0].mlp
    if not isinstance(attention, AttentionConfig) or not isinstance(mlp, DenseConfig):
        return (
            f"As config.json says: {model.num_layers} layers, hidden {model.hidden_size}{tied}, "
            f"positions up to {model.max_position}"
        )
    return (
        f"Llama: {model.num_layers} layers, hidden {model.hidden_size}, {attention.num_heads} "
        f"query and {attention.num_kv_heads} KV heads of {attention.head_dim}, SwiGLU of "
        f"{mlp.intermediate_size}, rope theta {attention.rope.theta:g}{tied}, positions up to "
        f"{model.max_position}"
    )


def _data_table(report: Report) -> str:
    rows = ["| folder | files | MB |", "|---|---|---|"]
    for source, (files, size) in report.sources.items():
        rows.append(f"| {Path(source).name} | {files} | {size / 1e6:.2f} |")
    return "\n".join(rows)


def _skipped(report: Report) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in sorted(report.skipped.items())) or "none"
