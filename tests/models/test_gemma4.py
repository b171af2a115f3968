"""Gemma 4: what its configs say, and what is refused. Logits are compared with transformers' in
test_parity.py, and texts with plain decoding in tests/decoding/test_families_under_load.py."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxspec.config.mlps import DenseConfig
from jaxspec.config.rope import ProportionalRopeScaling, RopeConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.forward import forward
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.rope import rope_frequencies
from tests.helpers.alias_checkpoints import random_alias, raw_config
from tests.helpers.checkpoints import save_random_model
from tests.helpers.gemma4_checkpoints import DENSE, SMALL, VARIANTS
from tests.helpers.parity import load
from tests.helpers.quantized_checkpoints import FORMATS, quantize_checkpoint
from tests.helpers.sampling_reference import plain_logits

TEXT: dict[str, Any] = DENSE | {"model_type": "gemma4_text"}
SHARED: dict[str, Any] = SMALL | {"model_type": "gemma4_text"}
SLIDES, FULL = "sliding_attention", "full_attention"


def test_heads_of_full_layers_are_in_keys_of_their_own_or_by_layer():
    saved = VARIANTS["gemma4"][0](text_config=DENSE).to_dict()["text_config"]
    assert "global_head_dim" not in saved
    published, read = parse_model_config(TEXT), parse_model_config(saved)
    assert published == read
    sliding, full, _ = (layer.attention for layer in read.layers)
    assert (sliding.num_kv_heads, sliding.head_dim, sliding.window) == (2, 16, 7)
    assert (full.num_kv_heads, full.head_dim, full.window) == (1, 32, None)
    assert full.values_are_keys and not sliding.values_are_keys


def test_kv_heads_of_full_layers_are_as_many_unless_values_are_keys():
    model = parse_model_config(TEXT | {"attention_k_eq_v": False})
    assert [layer.attention.num_kv_heads for layer in model.layers] == [2, 2, 2]


def test_every_sixth_layer_and_the_last_are_full():
    model = parse_model_config(TEXT | {"layer_types": None, "num_hidden_layers": 8})
    assert [i for i, layer in enumerate(model.layers) if not layer.attention.window] == [5, 7]


def test_proportional_frequencies_are_those_of_transformers():
    config = VARIANTS["gemma4"][0](text_config=DENSE).text_config
    expected, _ = ROPE_INIT_FUNCTIONS["proportional"](config, layer_type=FULL)
    rope = parse_model_config(TEXT).layers[1].attention.rope
    assert rope == RopeConfig(32, 1e6, ProportionalRopeScaling(4))
    np.testing.assert_allclose(rope_frequencies(rope), expected.numpy(), rtol=1e-6)


def test_the_last_layers_read_keys_of_the_last_ones_of_their_kind_before_them():
    model = parse_model_config(SHARED)
    assert [layer.source for layer in model.layers] == [None] * 4 + [2, 2, 3]
    assert [layer.mlp for layer in model.layers] == [
        DenseConfig(width, activation="gelu_tanh") for width in [96] * 4 + [192] * 3
    ]
    assert model.token_input == 8 and model.sources == {2, 3}


def per_layer(**changes: Any) -> dict[str, Any]:
    """The config with the heads of its full layers by layer."""
    rest = {key: value for key, value in TEXT.items() if "global" not in key}
    full = {"head_dim": 32, "num_key_value_heads": 1}
    return rest | {"per_layer_config": {"1": full, "2": full} | changes}


def both(**heads: int) -> dict[str, Any]:
    """The same with other heads of both full layers."""
    return per_layer(**{"1": heads, "2": heads})


def test_keys_by_layer_are_read():
    assert parse_model_config(per_layer()) == parse_model_config(TEXT)
    zeros = {"per_layer_config": {"01": {"head_dim": 32}, "02": {"head_dim": 32}}}
    assert parse_model_config(per_layer() | zeros).layers[2].attention.num_kv_heads == 2


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            per_layer(**{"0": {}}),
            "per_layer_config may have layers of full_attention only",
        ),
        (per_layer(**{"2": {}}), "per_layer_config: layers of full_attention must be alike"),
        (per_layer(**{"2": 1}), "per_layer_config must be an object of objects"),
        (
            per_layer() | {"global_head_dim": 48},
            "global_head_dim = 48 contradicts head_dim of",
        ),
        (
            per_layer() | {"num_global_key_value_heads": 2},
            "num_global_key_value_heads = 2 contradicts num_key_value_heads of per_layer_config",
        ),
        (
            both(head_dim=0),
            "per_layer_config: head_dim must be a positive integer, got 0",
        ),
        (
            both(sliding_window=3),
            "per_layer_config: unknown key 'sliding_window' (= 3)",
        ),
        (
            both(num_key_value_heads=3),
            "num_attention_heads (4) must be a multiple of the KV heads of per_layer_config (3)",
        ),
        (
            TEXT | {"num_global_key_value_heads": 3},
            "num_attention_heads (4) must be a multiple of num_global_key_value_heads (3)",
        ),
        (TEXT | {"layer_types": [FULL, FULL, SLIDES]}, "layer_types must end with full_attention"),
        (TEXT | {"layer_types": [FULL]}, "layer_types has 1 entries for 3 layers"),
        (
            TEXT | {"rope_parameters": {FULL: {"rope_type": "default"}}},
            "rope_parameters must have full_attention and sliding_attention",
        ),
        (
            TEXT
            | {
                "rope_parameters": {
                    SLIDES: {"rope_type": "default"},
                    FULL: {"rope_type": "proportional", "partial_rotary_factor": 2},
                }
            },
            "partial_rotary_factor must be above 0, at most 1, got 2",
        ),
        (TEXT | {"rope_theta": 5.0}, "rope_theta = 5.0 is not supported, only None"),
        (TEXT | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is"),
        (TEXT | {"attention_k_eq_v": 1}, "attention_k_eq_v must be true or false, got 1"),
        (
            TEXT | {"num_kv_shared_layers": 3},
            "num_kv_shared_layers must be 0 or more, and below num",
        ),
        (
            TEXT | {"num_kv_shared_layers": 2},
            "num_kv_shared_layers = 2 leaves no layer of full_attention with keys",
        ),
        (
            SHARED | {"vocab_size_per_layer_input": 9},
            "vocab_size_per_layer_input = 9 contradicts vocab_size (= 320)",
        ),
        (
            SHARED | {"hidden_size_per_layer_input": -1},
            "hidden_size_per_layer_input must be 0 or a positive integer, got -1",
        ),
        (SHARED | {"use_double_wide_mlp": 2}, "use_double_wide_mlp must be true or false, got 2"),
        (
            TEXT | {"enable_moe_block": True, "num_experts": 4},
            "enable_moe_block needs top_k_experts, moe_intermediate_size",
        ),
        (TEXT | {"hidden_activation": "silu"}, "hidden_activation = 'silu' is not supported"),
    ],
)
def test_what_is_not_supported_is_named(raw: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        parse_model_config(raw)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["awq", "gptq", "compressed"])
@pytest.mark.parametrize("sizes", [DENSE, SMALL], ids=["dense", "small"])
def test_quantized_checkpoints_are_read(sizes: dict[str, Any], name: str, tmp_path: Path):
    """Queries alone, and keys that are values, are projections as others are."""
    wide = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "global_head_dim": 64}
    config = transformers.Gemma4TextConfig(**sizes | wide)
    source = save_random_model(tmp_path / "source", config)
    quantized, dense = quantize_checkpoint(
        source,
        tmp_path,
        FORMATS[name],
        lambda tensor: ".layers." in tensor and tensor.endswith("proj.weight"),
    )
    tokens = np.random.default_rng(3).integers(0, 320, (2, 20))
    found, expected = (plain_logits(load(model), tokens) for model in (quantized, dense))
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma4-small", "gemma4-experts"])
def test_layers_that_are_computed_again_have_the_same_gradients(name: str):
    """Those that read keys of others, too."""
    model = random_alias(name)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 96, (2, 12)))

    def loss(model: Decoder, remat: bool) -> jax.Array:
        logits = forward(model, tokens, remat=remat)
        return jnp.sum(jax.nn.log_softmax(logits)[..., 3])

    once, again = (jax.tree.leaves(jax.grad(loss)(model, remat)) for remat in (False, True))
    for one, other in zip(once, again, strict=True):
        assert jnp.abs(one).max() > 0
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


def test_configs_of_tests_are_read():
    assert all(parse_model_config(raw_config(name)).num_layers for name in VARIANTS)
