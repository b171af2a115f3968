"""Quantized checkpoints of latent attention: kv_b_proj is keys and values, two projections in
memory."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from jaxspec.checkpoints.safetensors_io import load_decoder
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import Decoder
from jaxspec.models.from_config.model import load_model_config
from jaxspec.models.linear import Linear
from jaxspec.parallel import make_mesh
from tests.helpers.checkpoints import TINY, save_random_model
from tests.helpers.quantized_checkpoints import FORMATS, quantize_checkpoint

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 32,
    "v_head_dim": 128,
    "num_mtp_layers": 0,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    config = transformers.DeepseekV3Config(**TINY | SIZES)
    return save_random_model(tmp_path_factory.mktemp("source"), config)


def load(directory: Path, **options: Any) -> Decoder:
    return load_decoder(directory, load_model_config(directory), jnp.dtype("float32"), **options)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("devices", [1, 2])
def test_keys_and_values_are_what_the_tensor_means(name: str, devices: int, source, tmp_path):
    quantized, dense = quantize_checkpoint(source, tmp_path, FORMATS[name])
    mesh = None if devices == 1 else make_mesh(devices, 1)
    ours: Any = load(quantized, mesh=mesh).layers[0].mixer
    theirs: Any = load(dense).layers[0].mixer
    dtype = jnp.dtype("float32")
    for found, wanted in ((ours.key_up, theirs.key_up), (ours.value_up, theirs.value_up)):
        assert not isinstance(found, Linear) and isinstance(wanted, Linear)
        np.testing.assert_allclose(found.dense(dtype), wanted.dense(dtype), rtol=2e-6, atol=1e-9)


def test_logits_are_those_of_the_dense_weights(source, tmp_path):
    quantized, dense = (load(one) for one in quantize_checkpoint(source, tmp_path, FORMATS["awq"]))
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 320, (2, 12)))
    positions = jnp.broadcast_to(jnp.arange(12), tokens.shape)

    def logits(model: Decoder) -> Any:
        states = model.no_states()
        hidden, _, _ = decoder.run(model, tokens, positions, states, dense_causal_attend)
        return decoder.logits(model, hidden)

    np.testing.assert_allclose(logits(quantized), logits(dense), rtol=1e-4, atol=1e-4)
