"""from_nnx on models of Tunix's own classes: the logits are the actor's. Needs google-tunix."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec import Lora, check_against, from_nnx
from jaxspec.models.from_config.model import parse_model_config

llama = pytest.importorskip("tunix.models.llama3.model", reason="needs google-tunix")
qwen2 = pytest.importorskip("tunix.models.qwen2.model")
qwen3 = pytest.importorskip("tunix.models.qwen3.model")
gemma = pytest.importorskip("tunix.models.gemma.model")
qwix = pytest.importorskip("qwix")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Tunix's use of flax
]

V, D, L, N, K, H, F = 64, 32, 2, 4, 2, 8, 48
SIZES: dict[str, Any] = dict(
    num_layers=L, embed_dim=D, hidden_dim=F, num_heads=N, head_dim=H, num_kv_heads=K
)
CONFIG: dict[str, Any] = dict(
    vocab_size=V, hidden_size=D, num_hidden_layers=L, num_attention_heads=N, head_dim=H,
    num_key_value_heads=K, intermediate_size=F, rms_norm_eps=1e-6, max_position_embeddings=128,
    hidden_act="silu", eos_token_id=2, bos_token_id=1, rope_theta=1e6, tie_word_embeddings=False,
)  # fmt: skip
GELU = "gelu_pytorch_tanh"
GEMMA = {"hidden_act": GELU, "hidden_activation": GELU, "tie_word_embeddings": True}
GEMMA |= {"rope_theta": 1e4}


def actor(name: str) -> tuple[Any, str, dict[str, Any]]:
    """A model, its table, and what its config.json has."""
    rngs, plain = nnx.Rngs(0), {**SIZES, "vocab_size": V, "norm_eps": 1e-6, "rope_theta": 1_000_000}
    match name:
        case "llama3":
            model = llama.Llama3(llama.ModelConfig(**plain, weight_tying=False), rngs=rngs)
            return model, "tunix.llama3", hf("llama", "LlamaForCausalLM")
        case "qwen2":
            model = qwen2.Qwen2(qwen2.ModelConfig(**plain), rngs=rngs)
            return model, "tunix.qwen2", hf("qwen2", "Qwen2ForCausalLM")
        case "qwen3":
            model = qwen3.Qwen3(qwen3.ModelConfig(**plain), rngs=rngs)
            return model, "tunix.qwen3", hf("qwen3", "Qwen3ForCausalLM")
    kv = N if name == "gemma-mha" else K
    is_second = name == "gemma2"
    kinds = [gemma.AttentionType.LOCAL_SLIDING, gemma.AttentionType.GLOBAL]
    config = gemma.ModelConfig(
        **{**SIZES, "num_kv_heads": kv},
        num_embed=V,
        final_logit_softcap=30.0 if is_second else None,
        attn_logits_soft_cap=50.0 if is_second else None,
        use_post_attn_norm=is_second,
        use_post_ffw_norm=is_second,
        sliding_window_size=16 if is_second else None,
        attention_types=kinds if is_second else kinds[1:] * L,
    )
    more = {"sliding_window": 16, "query_pre_attn_scalar": H, "attn_logit_softcapping": 50.0}
    more |= {"final_logit_softcapping": 30.0}
    kind, name = ("gemma2", "Gemma2ForCausalLM") if is_second else ("gemma", "GemmaForCausalLM")
    raw = hf(kind, name, **GEMMA, **(more if is_second else {}), num_key_value_heads=kv)
    return gemma.Gemma(config, rngs=rngs), "tunix.gemma", raw


def hf(kind: str, architecture: str, **changes: Any) -> dict[str, Any]:
    return {**CONFIG, "model_type": kind, "architectures": [architecture], **changes}


def randomize(model: Any, kind: Any, scale: float) -> None:
    """Give all parameters of a kind random values: some classes begin with zeros."""
    rng = np.random.default_rng(1)
    state = nnx.state(model, kind)

    def fill(leaf: jax.Array) -> jax.Array:
        size = scale / np.sqrt(leaf.shape[0] if leaf.ndim == 2 else D)
        return jnp.asarray(
            rng.normal(size=leaf.shape) * (0.1 if leaf.ndim == 1 else size), leaf.dtype
        )

    nnx.update(model, jax.tree.map(fill, state))


def logits_of(model: Any) -> Any:
    def logits(tokens: jax.Array) -> jax.Array:
        batch, length = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length))
        return model(tokens, positions, None, mask)[0]

    return logits


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3", "gemma", "gemma-mha", "gemma2"])
def test_logits_are_those_of_the_actor(name: str):
    model, names, config = actor(name)
    randomize(model, nnx.Param, 1.0)
    assert check_against(logits_of(model), from_nnx(model, config, names=names)) < 1e-4


@pytest.mark.parametrize("name", ["llama3", "gemma", "gemma-mha"])
def test_lora_weights_of_qwix_are_merged(name: str):
    model, names, config = actor(name)
    randomize(model, nnx.Param, 1.0)
    modules = ".*(q|k|v|o|gate|up|down)_proj|.*einsum"
    provider = qwix.LoraProvider(module_path=modules, rank=3, alpha=6.0)
    tokens = jnp.ones((1, 8), jnp.int32)
    argument = "last_tokens" if names == "tunix.gemma" else "input_tokens"
    model = qwix.apply_lora_to_model(
        model,
        provider,
        **{argument: tokens, "positions": tokens, "cache": None},
        attention_mask=jnp.ones((1, 8, 8), bool),
        rngs=nnx.Rngs(2),
    )
    randomize(model, nnx.LoRAParam, 0.5)
    plain = from_nnx(nnx.state(model, lambda path, leaf: not isinstance(leaf, nnx.LoRAParam)
                               and isinstance(leaf, nnx.Param)), config, names=names)  # fmt: skip
    target = from_nnx(model, config, names=names, lora=Lora(alpha=6.0, rank=3))
    assert check_against(logits_of(model), target) < 1e-4
    with pytest.raises(ValueError, match="LoRA weights"):
        check_against(logits_of(model), plain)


def test_the_base_of_tunix_llama_is_not_that_of_its_config():
    model, names, config = actor("llama3")
    randomize(model, nnx.Param, 1.0)
    target = from_nnx(model, parse_model_config({**config, "rope_theta": 5e5}), names=names)
    with pytest.raises(ValueError, match="base 1,000,000"):
        check_against(logits_of(model), target)
