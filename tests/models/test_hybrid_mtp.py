"""MTP layers in Qwen's layout, against their equations written out in NumPy."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from jax import Array

from jaxspec.checkpoints.load import load
from jaxspec.checkpoints.load_drafter import choose_drafter
from jaxspec.checkpoints.mtp import has_mtp_layers, holds_only_mtp_layers, load_mtp_head
from jaxspec.checkpoints.safetensors_io import load_decoder
from jaxspec.config.experts import ExpertsConfig
from jaxspec.config.mixers import AttentionConfig
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import FINAL_NORM
from jaxspec.models.from_config.model import load_model_config
from jaxspec.models.heads import HeadOutput
from tests.helpers.checkpoints import add_mtp_layer, save_tensors
from tests.helpers.hybrid_checkpoints import contents, save_hybrid
from tests.helpers.marks import slow
from tests.helpers.parity import paged_head_logits
from tests.models.test_mtp_layers import COUNT, DRAWN, draft_after

FLOAT32 = jnp.dtype("float32")
TOKENS = np.random.default_rng(0).integers(0, 320, (2, 13))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """variant -> its directory"""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = add_mtp_layer(save_hybrid(tmp_path_factory.mktemp(name), name), "qwen")
        return made[name]

    return make


class Reference:
    """An MTP layer in float64, over one sequence. x is [T, H]."""

    def __init__(self, tensors: dict[str, np.ndarray], config: dict[str, Any]):
        self.tensors = {name: x.astype(np.float64) for name, x in tensors.items()}
        self.config, self.eps = config, config["rms_norm_eps"]
        self.embeddings = self.tensors["model.embed_tokens.weight"]

    def product(self, name: str, x: np.ndarray) -> np.ndarray:
        bias = self.tensors.get(f"mtp.{name}.bias", 0.0)
        return x @ self.tensors[f"mtp.{name}.weight"].T + bias

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return x / scale * (1 + self.tensors[f"mtp.{name}.weight"])

    def rotated(self, x: np.ndarray) -> np.ndarray:
        """x [T, heads, D]: the first entries of each head are rotated in pairs of halves."""
        rope = self.config["rope_parameters"]
        width = int(x.shape[-1] * rope["partial_rotary_factor"])
        pairs = np.arange(width // 2)
        angles = np.arange(len(x))[:, None] * rope["rope_theta"] ** (-2 * pairs / width)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = x[..., : width // 2], x[..., width // 2 : width]
        turned = first * cos - second * sin, second * cos + first * sin
        return np.concatenate([*turned, x[..., width:]], axis=-1)

    def attention(self, x: np.ndarray) -> np.ndarray:
        own, length = "layers.0.self_attn.", len(x)
        heads, groups = (self.config[f"num_{k}_heads"] for k in ("attention", "key_value"))
        both = self.product(f"{own}q_proj", x).reshape(length, heads, 2, -1)
        k, v = (self.product(f"{own}{n}_proj", x).reshape(length, groups, -1) for n in "kv")
        q = self.rotated(self.norm(f"{own}q_norm", both[:, :, 0]))
        k = self.rotated(self.norm(f"{own}k_norm", k))
        k, v = (np.repeat(one, heads // groups, axis=1) for one in (k, v))
        scores = np.einsum("tqd,sqd->qts", q, k) / np.sqrt(q.shape[-1])
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out = np.einsum("qts,sqd->tqd", weights / weights.sum(axis=-1, keepdims=True), v)
        return self.product(f"{own}o_proj", (out * sigmoid(both[:, :, 1])).reshape(length, -1))

    def gated(self, own: str, x: np.ndarray) -> np.ndarray:
        gate = self.product(f"{own}gate_proj", x)
        return self.product(
            f"{own}down_proj", gate * sigmoid(gate) * self.product(f"{own}up_proj", x)
        )

    def mlp(self, x: np.ndarray) -> np.ndarray:
        own = "layers.0.mlp."
        if "mtp.layers.0.mlp.gate.weight" not in self.tensors:
            return self.gated(own, x)
        out = sigmoid(self.product(f"{own}shared_expert_gate", x))
        out = out * self.gated(f"{own}shared_expert.", x)
        for row, scores in enumerate(np.exp(self.product(f"{own}gate", x))):
            chosen = np.argsort(-scores)[: self.config["num_experts_per_tok"]]
            for expert in chosen:  # weights are normalized over the chosen ones
                added = self.gated(f"{own}experts.{expert}.", x[row])
                out[row] += scores[expert] / scores[chosen].sum() * added
        return out

    def __call__(self, embedded: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        """The state after the layer's norm, of embeddings and the hidden states before them."""
        parts = (
            self.norm("pre_fc_norm_embedding", embedded),
            self.norm("pre_fc_norm_hidden", hidden),
        )
        x = self.product("fc", np.concatenate(parts, axis=-1))
        x = x + self.attention(self.norm("layers.0.input_layernorm", x))
        x = x + self.mlp(self.norm("layers.0.post_attention_layernorm", x))
        return self.norm("norm", x)

    def logits(self, normed: np.ndarray) -> np.ndarray:
        return normed @ self.tensors.get("lm_head.weight", self.embeddings).T

    def drafted(self, text: list[int], hidden: np.ndarray) -> np.ndarray:
        """Log-probabilities [COUNT, V] of a text's last tokens, which were drafted after a context
        with these hidden states."""
        found = []
        for _ in range(COUNT):
            out = self(self.embeddings[text[1 : 1 + len(hidden)]], hidden)
            last = self.logits(out[-1])
            found.append(last - np.log(np.exp(last - last.max()).sum()) - last.max())
            hidden = np.concatenate([hidden, out[-1:]])
        return np.array(found)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def final_hidden(directory: Path, tokens: np.ndarray = TOKENS) -> np.ndarray:
    """transformers' hidden states after the final norm: [B, T, H]."""
    model = transformers.AutoModel.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).last_hidden_state.numpy().astype(np.float64)


@pytest.mark.parametrize("name", ["qwen3_next", slow("qwen3_5_text"), slow("qwen3_5_text-tied")])
def test_logits_are_those_of_the_equations(checkpoint, name: str):
    path = checkpoint(name)
    config = load_model_config(path)
    target, head = load_decoder(path, config, FLOAT32), load_mtp_head(path, config, FLOAT32)
    reference, hidden = Reference(*contents(path)), final_hidden(path)[:, :-1]
    rows = zip(reference.embeddings[TOKENS[:, 1:]], hidden, strict=True)
    expected = np.stack([reference(*row) for row in rows])
    assert head.capture == (FINAL_NORM,)

    @jax.jit
    def run(tokens: Array, captured: Array) -> HeadOutput:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden = head.hidden(captured)
        return head.run(target, tokens, hidden, positions, (None,), dense_causal_attend)

    out = run(jnp.asarray(TOKENS[:, 1:]), jnp.asarray(hidden, jnp.float32))
    print(f"{name}: {np.abs(out.normed - expected).max():.1e} of {np.abs(expected).max():.1f}")
    np.testing.assert_allclose(out.normed, expected, rtol=0, atol=1e-4)
    assert np.array_equal(out.hidden, out.normed), "the next draft step reads the normed state"
    logits, expected = head.logits(target, out.normed), reference.logits(expected)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-4)
    for page_size, step in ((5, 1), (3, 12), (7, 4), (1, 1)):  # keys and values are cached
        found = paged_head_logits(head, target, TOKENS[:, 1:], hidden, page_size, step)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "width", "rounds"),
    [
        ("qwen3_5_text", 1, 0),
        slow("qwen3_5_text", 7, 3),
        slow("qwen3_next", 1, 0),
        slow("qwen3_next", 32, 4),
    ],
)
def test_drafts_are_those_of_the_equations(checkpoint, name: str, width: int, rounds: int):
    """Over pages of five slots, of prompts read token by token, in pieces or whole, and after
    rounds that rejected drafts."""
    path = checkpoint(name)
    texts, ours = draft_after(load(path, "mtp", speculation=DRAWN, dtype="float32"), width, rounds)
    reference = Reference(*contents(path))
    contexts = [np.array([text[: -COUNT - 1]]) for text in texts]
    hidden = [final_hidden(path, context)[0] for context in contexts]
    theirs = np.stack([reference.drafted(*one) for one in zip(texts, hidden, strict=True)])
    print(f"{name}: {np.abs(ours - theirs).max():.1e} of {np.abs(theirs).max():.1f}")
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)


def test_the_layer_has_gated_attention_and_the_models_mlp(checkpoint):
    path = checkpoint("qwen3_next")
    config = load_model_config(path)
    kinds = "full_attention", "full_attention", "full_attention", "linear_attention"
    tensors, raw = contents(path)
    raw["layer_types"] = list(kinds)  # the last layer is recurrent, and the MTP layer is not
    save_tensors(path / "other", {}, raw)
    for own in (config, load_model_config(path / "other")):
        [layer] = load_mtp_head(path, own, FLOAT32).config.layers
        assert isinstance(layer.mixer, AttentionConfig) and layer.mixer.gated
        assert isinstance(layer.mlp, ExpertsConfig) and layer.mlp.shared_gate


def test_checkpoints_draft_with_their_own_layers(checkpoint):
    path = checkpoint("qwen3_5_text")
    assert choose_drafter(path, "auto") == "mtp:after"
    drafter: Any = load(path).drafter
    assert drafter.head.method == "mtp" and drafter.capture == (FINAL_NORM,)


def test_layers_by_themselves_and_none(checkpoint, tmp_path: Path):
    path = checkpoint("qwen3_5_text")
    config, (tensors, raw) = load_model_config(path), contents(path)
    mtp = {name: x for name, x in tensors.items() if name.startswith("mtp.")}
    assert holds_only_mtp_layers(save_tensors(tmp_path / "mtp", mtp, raw))
    alone, own = (load_mtp_head(one, config, FLOAT32) for one in (tmp_path / "mtp", path))
    np.testing.assert_array_equal(alone.front.fc.weight, own.front.fc.weight)
    rest = {name: x for name, x in tensors.items() if name not in mtp}
    save_tensors(tmp_path / "none", rest, raw)
    assert not has_mtp_layers(tmp_path / "none", config)
    with pytest.raises(ValueError, match=r"no tensors mtp\.\*, though its config.json says"):
        load_mtp_head(tmp_path / "none", config, FLOAT32)
    save_tensors(tmp_path / "none", rest, raw | {"mtp_num_hidden_layers": 0})
    with pytest.raises(ValueError, match="no num_nextn_predict_layers or mtp_num_hidden_layers"):
        load_mtp_head(tmp_path / "none", config, FLOAT32)
