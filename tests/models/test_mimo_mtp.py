"""MiMo's MTP layers, against their equations written out in NumPy: logits of every depth."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from safetensors.numpy import load_file

from jaxspec import load
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.hf_config import load_model_config
from jaxspec.weights.mtp import MtpChoice, load_mtp_heads
from jaxspec.weights.safetensors_io import load_decoder
from tests.checkpoints import add_mtp_layer, tiny_qwen2
from tests.marks import slow
from tests.models.test_mtp_layers import COUNT, DRAWN, FLOAT32, draft_after

TOKENS = np.random.default_rng(3).integers(0, 257, (2, 19))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By number of MTP layers; rope and norms as in MiMo-7B's config."""
    return {
        count: add_mtp_layer(
            tiny_qwen2(
                tmp_path_factory.mktemp("mimo"),
                vocab_size=257,
                num_hidden_layers=2,
                rms_norm_eps=1e-5,
                rope_parameters={"rope_type": "default", "rope_theta": 640000.0},
            ),
            "mimo",
            count=count,
            noise=0.05,
        )
        for count in (1, COUNT)
    }


class Reference:
    """Model and MTP layers in float64, over one sequence. x is [T, H]."""

    def __init__(self, path: Path, *, normed: bool):
        self.config, self.normed = json.loads((path / "config.json").read_text()), normed
        stored = load_file(path / "model.safetensors")
        self.tensors = {name: x.astype(np.float64) for name, x in stored.items()}
        self.embed = self.tensors["model.embed_tokens.weight"]

    def product(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0.0)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / scale * self.tensors[f"{name}.weight"]

    def rotated(self, x: np.ndarray) -> np.ndarray:
        """x [T, heads, D]: the halves of each head are rotated in pairs."""
        half, theta = x.shape[-1] // 2, self.config["rope_parameters"]["rope_theta"]
        angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def layer(self, own: str, x: np.ndarray) -> np.ndarray:
        """A layer of Qwen2, which MiMo's are; those of its MTP layers too."""
        heads, groups = (self.config[f"num_{k}_heads"] for k in ("attention", "key_value"))
        read, length = self.norm(f"{own}input_layernorm", x), len(x)
        q, k, v = (
            self.product(f"{own}self_attn.{kind}_proj", read).reshape(length, count, -1)
            for kind, count in (("q", heads), ("k", groups), ("v", groups))
        )
        q, k = self.rotated(q), self.rotated(k)
        k, v = (np.repeat(one, heads // groups, axis=1) for one in (k, v))
        scores = np.einsum("tqd,sqd->qts", q, k) / np.sqrt(q.shape[-1])
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out = np.einsum("qts,sqd->tqd", weights / weights.sum(axis=-1, keepdims=True), v)
        x = x + self.product(f"{own}self_attn.o_proj", out.reshape(length, -1))
        read = self.norm(f"{own}post_attention_layernorm", x)
        gate, up = (self.product(f"{own}mlp.{kind}_proj", read) for kind in ("gate", "up"))
        return x + self.product(f"{own}mlp.down_proj", gate / (1 + np.exp(-gate)) * up)

    def body(self, ids: np.ndarray) -> np.ndarray:
        """What the MTP layers read of the model: after the final norm, or before."""
        x = self.embed[ids]
        for index in range(self.config["num_hidden_layers"]):
            x = self.layer(f"model.layers.{index}.", x)
        return self.norm("model.norm", x) if self.normed else x

    def mtp(self, index: int, hidden: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What the next layer reads, and logits [T, V], of hidden states and the tokens after."""
        own = f"model.mtp_layers.{index}."
        parts = (
            self.norm(f"{own}hidden_layernorm", hidden),
            self.norm(f"{own}token_layernorm", self.embed[ids]),
        )
        x = self.layer(own, self.product(f"{own}input_proj", np.concatenate(parts, axis=-1)))
        after = self.norm(f"{own}final_layernorm", x)
        return after if self.normed else x, self.product("lm_head", after)

    def every_depth(self, ids: np.ndarray) -> list[np.ndarray]:
        """Layer j after layer j - 1, over all tokens that it can read: logits [T - 1 - j, V]."""
        hidden, found = self.body(ids), []
        for index in range(COUNT):
            hidden, logits = self.mtp(index, hidden[:-1], ids[1 + index :])
            found.append(logits)
        return found

    def drafted(self, text: list[int], count: int) -> np.ndarray:
        """Log-probabilities [COUNT, V] of a text's last tokens, which ``count`` layers drafted: one
        each, or a single one all, over what it gave itself."""
        ids = np.array(text)
        hidden, found = self.body(ids[: -COUNT - 1]), []
        for step in range(COUNT):
            first = step if count > 1 else 0
            read = ids[1 + first : 1 + first + len(hidden)]
            out, logits = self.mtp(min(step, count - 1), hidden, read)
            hidden = out if count > 1 else np.concatenate([hidden, out[-1:]])
            last = logits[-1] - logits[-1].max()
            found.append(last - np.log(np.exp(last).sum()))
        return np.array(found)


@pytest.mark.parametrize("normed", [False, slow(True)])
def test_logits_of_every_depth_are_those_of_the_equations(
    normed: bool, checkpoints: dict[int, Path]
):
    """Each layer reads what the one before it gave, for every token."""
    path = checkpoints[COUNT]
    config, reference = load_model_config(path), Reference(path, normed=normed)
    target = load_decoder(path, config, FLOAT32)
    heads = load_mtp_heads(path, config, FLOAT32, choice=MtpChoice(normed=normed))

    @jax.jit
    def run(tokens: Array) -> list[Array]:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        none, attend = target.no_states(), dense_causal_attend
        captured = decoder.run(target, tokens, positions, none, attend, heads[0].capture)[2]
        assert captured is not None
        hidden, found = heads[0].hidden(captured), []
        for index, head in enumerate(heads):
            read = tokens[:, 1 + index :], hidden[:, :-1], positions[:, 1 + index :]
            out = head.run(target, *read, (None,), attend)
            hidden = out.hidden
            found.append(head.logits(target, out.normed))
        return found

    found = run(jnp.asarray(TOKENS))
    assert len(found) == COUNT
    each = zip(*map(reference.every_depth, TOKENS), strict=True)
    for depth, (ours, theirs) in enumerate(zip(found, map(np.stack, each), strict=True)):
        print(f"depth {depth}: {np.abs(ours - theirs).max():.1e} of {np.abs(theirs).max():.1f}")
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("normed", "count", "width", "rounds"),
    [
        (False, COUNT, 5, 2),
        slow(False, 1, 5, 2),
        slow(False, 1, 1, 0),
        slow(True, 1, 32, 3),
        slow(True, COUNT, 1, 4),
    ],
)
def test_drafts_are_those_of_the_equations(
    normed: bool, count: int, width: int, rounds: int, checkpoints: dict[int, Path]
):
    """Over pages of five slots, of prompts read in pieces, after rounds that rejected drafts."""
    path, name = checkpoints[count], f"mtp:{'after' if normed else 'before'}"
    params = load(path, name, speculation=DRAWN, dtype="float32")
    texts, ours = draft_after(params, width, rounds)
    reference = Reference(path, normed=normed)
    theirs = np.stack([reference.drafted(text, count) for text in texts])
    print(f"{name}, {count}: {np.abs(ours - theirs).max():.1e}")
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
