"""A Llama as Tunix writes it: the paths and shapes of google-tunix 0.1.7, and how it is called."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, WIDTH, INNER = 64, 48, 2, 4, 2, 16, 80
THETA, EPS = 1e6, 1e-5  # Tunix's llama3 rotates by this whatever its config says


class Array(nnx.Module):
    """One parameter, called ``w`` or otherwise."""

    def __init__(self, random: np.random.Generator, *shape: int, name: str = "w", fan: int = 1):
        value = random.normal(size=shape) * fan**-0.5 if len(shape) > 1 else np.ones(shape)
        setattr(self, name, nnx.Param(jax.device_put(value.astype(np.float32))))


def rms_norm(x: jax.Array, weight: Any) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + EPS) * weight[...]


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Queries or keys [B, T, heads, D] at positions [B, T]."""
    half = x.shape[-1] // 2
    angles = positions[..., None, None] * THETA ** (-jnp.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self, random: np.random.Generator):
        self.q_proj = Array(random, HIDDEN, HEADS, WIDTH, fan=HIDDEN)
        self.k_proj = Array(random, HIDDEN, KV_HEADS, WIDTH, fan=HIDDEN)
        self.v_proj = Array(random, HIDDEN, KV_HEADS, WIDTH, fan=HIDDEN)
        self.o_proj = Array(random, HEADS, WIDTH, HIDDEN, fan=HEADS * WIDTH)

    def __call__(self, x: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
        each: list[Any] = [self.q_proj, self.k_proj, self.v_proj]
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, one.w[...]) for one in each)
        q, k = rotate(q, positions) * WIDTH**-0.5, rotate(k, positions)
        k, v = (jnp.repeat(one, HEADS // KV_HEADS, axis=2) for one in (k, v))
        scores = jnp.where(mask[:, None], jnp.einsum("btnh,bsnh->bnts", q, k), -1e30)
        mixed = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
        output: Any = self.o_proj
        return jnp.einsum("btnh,nhd->btd", mixed, output.w[...])


class Mlp(nnx.Module):
    def __init__(self, random: np.random.Generator):
        self.gate_proj = Array(random, HIDDEN, INNER, name="kernel", fan=HIDDEN)
        self.up_proj = Array(random, HIDDEN, INNER, name="kernel", fan=HIDDEN)
        self.down_proj = Array(random, INNER, HIDDEN, name="kernel", fan=INNER)

    def __call__(self, x: jax.Array) -> jax.Array:
        each: list[Any] = [self.gate_proj, self.up_proj, self.down_proj]
        gate, up, down = (one.kernel[...] for one in each)
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down


class Layer(nnx.Module):
    def __init__(self, random: np.random.Generator):
        self.input_layernorm, self.attn = Array(random, HIDDEN), Attention(random)
        self.post_attention_layernorm, self.mlp = Array(random, HIDDEN), Mlp(random)

    def __call__(self, x: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
        before, after = self.input_layernorm, self.post_attention_layernorm
        x = x + self.attn(rms_norm(x, before.w), positions, mask)  # pyright: ignore
        return x + self.mlp(rms_norm(x, after.w))  # pyright: ignore


class NnxLlama(nnx.Module):
    """Called as Tunix calls its models: ``model(tokens, positions=, cache=, attention_mask=)``."""

    def __init__(self, seed: int = 0):
        random = np.random.default_rng(seed)
        self.embedder = Array(random, VOCAB, HIDDEN, name="input_embedding", fan=10)
        self.layers = nnx.List([Layer(random) for _ in range(LAYERS)])
        self.final_norm = Array(random, HIDDEN)
        self.lm_head = Array(random, HIDDEN, VOCAB, fan=HIDDEN)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, cache: None, attention_mask: jax.Array
    ) -> tuple[jax.Array, None]:
        parts: Any = self
        x = parts.embedder.input_embedding[...][tokens]
        for layer in self.layers:
            x = layer(x, positions, attention_mask)
        return rms_norm(x, parts.final_norm.w) @ parts.lm_head.w[...], None


def write_config(folder: Path, theta: float = THETA, vocab_size: int = VOCAB) -> Path:
    """The folder, with the config.json of NnxLlama, but for what is given."""
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"},
        **{"vocab_size": vocab_size, "hidden_size": HIDDEN, "intermediate_size": INNER},
        **{"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": WIDTH},
        **{"num_key_value_heads": KV_HEADS, "rms_norm_eps": EPS, "rope_theta": theta},
        **{"max_position_embeddings": 512, "tie_word_embeddings": False, "eos_token_id": 2},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# What MaxText calls arrays of a layer, and of the whole model.
SCANNED = {
    "self_attention.query.kernel": "attn.q_proj.w",
    "self_attention.key.kernel": "attn.k_proj.w",
    "self_attention.value.kernel": "attn.v_proj.w",
    "self_attention.out.kernel": "attn.o_proj.w",
    "mlp.wi_0.kernel": "mlp.gate_proj.kernel",
    "mlp.wi_1.kernel": "mlp.up_proj.kernel",
    "mlp.wo.kernel": "mlp.down_proj.kernel",
    "pre_self_attention_layer_norm.scale": "input_layernorm.w",
    "post_self_attention_layer_norm.scale": "post_attention_layernorm.w",
}
SINGLE = {
    "token_embedder.embedding": "embedder.input_embedding",
    "decoder.decoder_norm.scale": "final_norm.w",
    "decoder.logits_dense.kernel": "lm_head.w",
}


class ScannedLlama(nnx.Module):
    """The same model as MaxText's TunixMaxTextAdapter keeps it: layers along axis 1, the pairs of
    rotary dimensions side by side, queries divided by the root of their width."""

    def __init__(self, seed: int = 0):
        arrays = {
            ".".join(map(str, path)): np.asarray(leaf[...])
            for path, leaf in nnx.to_flat_state(nnx.state(NnxLlama(seed)))
        }
        tree: dict[str, Any] = {name: arrays[path] for name, path in SINGLE.items()}
        for name, path in SCANNED.items():
            each = [arrays[f"layers.{layer}.{path}"] for layer in range(LAYERS)]
            if name.split(".")[1] in ("query", "key"):
                halves = (np.split(one, 2, axis=-1) for one in each)
                each = [np.stack(pair, axis=-1).reshape(*pair[0].shape[:-1], -1) for pair in halves]
            stacked = np.stack(each, axis=1)
            scale = WIDTH**-0.5 if ".query." in name else 1.0
            tree[f"decoder.layers.{name}"] = stacked * np.float32(scale)
        nested = traverse_util.unflatten_dict({tuple(key.split(".")): tree[key] for key in tree})
        self.base = _modules(jax.device_put(nested))

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, cache: None, attention_mask: jax.Array
    ) -> tuple[jax.Array, None]:
        base = {
            ".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(self))
        }
        arrays = {path: base[f"base.{name}"] for name, path in SINGLE.items()}
        for name, path in SCANNED.items():
            stacked = base[f"base.decoder.layers.{name}"]
            if name.split(".")[1] in ("query", "key"):
                stacked = jnp.concatenate([stacked[..., ::2], stacked[..., 1::2]], axis=-1)
            if ".query." in name:
                stacked = stacked * WIDTH**0.5
            for layer in range(LAYERS):
                arrays[f"layers.{layer}.{path}"] = stacked[:, layer]
        graph, state = nnx.split(NnxLlama())
        flat = [
            (path, leaf.replace(arrays[".".join(map(str, path))]))
            for path, leaf in nnx.to_flat_state(state)
        ]
        model = nnx.merge(graph, nnx.from_flat_state(flat))
        return model(tokens, positions, cache, attention_mask)


def _modules(tree: dict[str, Any]) -> nnx.Dict:
    return nnx.Dict(
        {
            name: _modules(part) if isinstance(part, dict) else nnx.Param(part)
            for name, part in tree.items()
        }
    )
