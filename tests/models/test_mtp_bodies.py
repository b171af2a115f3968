"""MTP layers of whole models of DeepSeek-V3 and GLM-4.5: transformers' logits.

With latent attention and experts, or grouped queries and experts, in model and MTP layer alike.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxspec import load
from jaxspec.checkpoints.mtp import load_mtp_head
from jaxspec.checkpoints.safetensors_io import load_decoder
from jaxspec.config.experts import ExpertsConfig
from jaxspec.config.latent import LatentConfig
from jaxspec.config.mixers import AttentionConfig
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.from_config.model import load_model_config
from tests.helpers.checkpoints import TINY, add_mtp_layer, save_random_model
from tests.helpers.marks import slow
from tests.helpers.mtp_reference import draft_log_probs, torch_mtp_of_family
from tests.models import test_expert_families, test_latent_attention
from tests.models.test_mtp_layers import COUNT, DRAWN, FLOAT32, draft_after

TOKENS = np.random.default_rng(0).integers(0, 320, (2, 13))
LATENT, EXPERTS = test_latent_attention, test_expert_families
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "deepseek_v3": (transformers.DeepseekV3Config, LATENT.SMALL | LATENT.VARIANTS["all"]),
    "deepseek_v3-halves": (
        transformers.DeepseekV3Config,
        LATENT.SMALL | {"rope_interleave": False},
    ),
    "glm4_moe": (transformers.Glm4MoeConfig, EXPERTS.GLM),
    "glm4_moe-qk-norm": EXPERTS.VARIANTS["glm4_moe-qk-norm"],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """(variant, number of MTP layers) -> its directory"""
    made: dict[tuple[str, int], Path] = {}

    def make(name: str, count: int = 1) -> Path:
        if (name, count) not in made:
            kind, own = VARIANTS[name]
            config = kind(**TINY | {"num_hidden_layers": 2} | own)
            path = save_random_model(tmp_path_factory.mktemp("mtp"), config)
            made[name, count] = add_mtp_layer(path, "deepseek", count=count, noise=0.05)
        return made[name, count]

    return make


@pytest.mark.parametrize("name", [slow(name) if "-" in name else name for name in VARIANTS])
def test_logits_are_those_of_transformers(checkpoint, name: str):
    """In one pass; each has the hidden states of its own model."""
    path = checkpoint(name)
    model, mtp = torch_mtp_of_family(path)
    ids = torch.from_numpy(TOKENS)
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states[-1]
        positions = torch.arange(ids.shape[1] - 1)[None]
        normed = mtp.forward_layer(0, hidden[:, :-1], positions, None, input_ids=ids[:, 1:])
        expected = model.lm_head(normed).numpy()
    config = load_model_config(path)
    target, head = load_decoder(path, config, FLOAT32), load_mtp_head(path, config, FLOAT32)
    [layer] = head.config.layers
    kind = LatentConfig if "deepseek" in name else AttentionConfig
    assert isinstance(layer.mixer, kind) and isinstance(layer.mlp, ExpertsConfig)

    @jax.jit
    def run(tokens: Any) -> Any:
        positions, none = jnp.broadcast_to(jnp.arange(13), tokens.shape), target.no_states()
        read = tokens, positions, none, dense_causal_attend
        captured = decoder.run(target, *read, head.capture)[2]
        assert captured is not None
        hidden = head.hidden(captured[:, :-1])
        read = tokens[:, 1:], hidden, positions[:, :-1], (None,), dense_causal_attend
        return head.logits(target, head.run(target, *read).normed)

    found = run(jnp.asarray(TOKENS))
    print(f"{name}: {np.abs(found - expected).max():.1e} of {np.abs(expected).max():.1f}")
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "count", "width", "rounds"),
    [
        ("deepseek_v3", 1, 5, 2),
        slow("glm4_moe", 1, 5, 2),
        slow("deepseek_v3", 1, 1, 0),  # the prompt read token by token
        slow("glm4_moe", 1, 1, 0),
        slow("deepseek_v3-halves", 1, 32, 3),
        slow("glm4_moe-qk-norm", 1, 32, 3),
        slow("deepseek_v3", 3, 5, 2),  # a layer for each step
        slow("glm4_moe", 3, 5, 2),
    ],
)
def test_draft_logits_are_those_of_transformers(
    checkpoint, name: str, count: int, width: int, rounds: int
):
    """Over pages of five slots, and after rounds that rejected drafts; one layer reads what it
    wrote itself, and all drafts of a chain are compared."""
    path = checkpoint(name, count)
    params = load(path, "mtp", speculation=DRAWN, dtype="float32")
    drafter: Any = params.drafter
    assert len(drafter.heads) == count
    texts, ours = draft_after(params, width, rounds)
    model, mtp = torch_mtp_of_family(path)
    theirs = np.stack([draft_log_probs(model, mtp, text, COUNT) for text in texts])
    print(f"{name}, {count}: {np.abs(ours - theirs).max():.1e} of {np.abs(theirs).max():.1f}")
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)
