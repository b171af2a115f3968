"""MiMo's MTP layers, against their equations written out in NumPy: logits of every depth."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from safetensors.numpy import load_file

from jaxspec import load
from jaxspec.checkpoints.mtp import MtpChoice, load_mtp_heads
from jaxspec.checkpoints.safetensors_io import load_decoder
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.from_config.model import load_model_config
from jaxspec.training.heads.loss import unroll
from tests.helpers.checkpoints import add_mtp_layer, tiny_qwen2
from tests.helpers.marks import slow
from tests.models.test_mtp_layers import COUNT, DRAWN, FLOAT32, draft_after

# What published engines do, of the model's state and of the MTP layer's own: see docs/drafters.md.
VLLM, SGLANG, EXLLAMAV3 = ("before", "after"), ("after", "after"), ("before", "before")
NOBODY = ("after", "before")
# By name of the drafter: the equations that it must draft by.
EQUATIONS = {
    "mtp": VLLM,
    "mtp:before-after": VLLM,
    "mtp:after": SGLANG,
    "mtp:before": EXLLAMAV3,
    "mtp:after-before": NOBODY,
}
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
    """Model and MTP layers in float64, over one sequence. x is [T, H].

    ``reads``: the state ``before`` or ``after`` its norm, of the model and of an MTP layer."""

    def __init__(self, path: Path, reads: tuple[str, str]):
        self.config = json.loads((path / "config.json").read_text())
        self.of_model, self.of_layer = reads
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
        """What the first MTP layer reads of the model."""
        x = self.embed[ids]
        for index in range(self.config["num_hidden_layers"]):
            x = self.layer(f"model.layers.{index}.", x)
        return {"before": x, "after": self.norm("model.norm", x)}[self.of_model]

    def mtp(self, index: int, hidden: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What the next step reads, and logits [T, V], of hidden states and the tokens after."""
        own = f"model.mtp_layers.{index}."
        parts = (
            self.norm(f"{own}hidden_layernorm", hidden),
            self.norm(f"{own}token_layernorm", self.embed[ids]),
        )
        x = self.layer(own, self.product(f"{own}input_proj", np.concatenate(parts, axis=-1)))
        after = self.norm(f"{own}final_layernorm", x)
        return {"before": x, "after": after}[self.of_layer], self.product("lm_head", after)

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


@pytest.mark.parametrize("name", ["mtp", *map(slow, list(EQUATIONS)[1:])])
def test_logits_of_every_depth_are_those_of_the_equations(name: str, checkpoints: dict[int, Path]):
    """Each layer reads what the one before it gave, for every token."""
    path = checkpoints[COUNT]
    config, reference = load_model_config(path), Reference(path, EQUATIONS[name])
    target = load_decoder(path, config, FLOAT32)
    choice = MtpChoice.parse(name)
    assert choice is not None
    heads = load_mtp_heads(path, config, FLOAT32, choice=choice)

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
    ("name", "count", "width", "rounds"),
    [
        ("mtp", 1, 5, 2),
        slow("mtp", COUNT, 5, 2),
        slow("mtp:before-after", 1, 32, 3),
        slow("mtp:before", COUNT, 5, 2),
        slow("mtp:before", 1, 5, 2),
        slow("mtp:before", 1, 1, 0),
        slow("mtp:after", 1, 32, 3),
        slow("mtp:after", COUNT, 1, 4),
        slow("mtp:after-before", 1, 7, 2),
        slow("mtp:after-before", COUNT, 32, 3),
    ],
)
def test_drafts_are_those_of_the_equations(
    name: str, count: int, width: int, rounds: int, checkpoints: dict[int, Path]
):
    """Over pages of five slots, of prompts read in pieces, after rounds that rejected drafts.
    Drafts by the equations of any other engine are far from them."""
    path = checkpoints[count]
    params = load(path, name, speculation=DRAWN, dtype="float32")
    texts, ours = draft_after(params, width, rounds)
    distances = {}
    for reads in set(EQUATIONS.values()):
        reference = Reference(path, reads)
        theirs = np.stack([reference.drafted(text, count) for text in texts])
        distances[reads] = np.abs(ours - theirs).max()
    print(f"{name}, {count}: {distances}")
    assert distances.pop(EQUATIONS[name]) < 1e-4
    assert min(distances.values()) > 0.05


@pytest.mark.parametrize("name", ["mtp", *map(slow, list(EQUATIONS)[1:])])
def test_training_unrolls_the_same_equations(name: str, checkpoints: dict[int, Path]):
    """Step by step, at several places of a row: a layer is trained on what it reads in drafting."""
    path = checkpoints[1]
    config, reference = load_model_config(path), Reference(path, EQUATIONS[name])
    params = load(path, name, speculation=DRAWN, dtype="float32")
    drafter: Any = params.drafter
    head, target = drafter.head, load_decoder(path, config, FLOAT32)

    @jax.jit
    def run(tokens: Array) -> list[Array]:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        none, attend = target.no_states(), dense_causal_attend
        captured = decoder.run(target, tokens, positions, none, attend, head.capture)[2]
        assert captured is not None
        steps = unroll(head, target, tokens, captured, COUNT)
        return [jax.nn.log_softmax(head.logits(target, normed)) for _, normed in steps]

    found = run(jnp.asarray(TOKENS))
    for row, ids in enumerate(TOKENS.tolist()):
        for root in (2, 9, len(ids) - COUNT - 1):  # the last token before the drafts
            ours = np.array([found[step][row, root + step] for step in range(COUNT)])
            theirs = reference.drafted(ids[: root + COUNT + 1], 1)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
