"""MaxText's own models, where it is installed: their logits, and rollouts for Tunix's adapter."""

import functools
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.linen import logical_axis_rules

from jaxspec import EngineConfig, check_against, from_nnx
from jaxspec.integrations.rollout_options import RolloutOptions
from tests.helpers.tunix_stub import EOS, PAD, LetterTokenizer

pytestmark = [
    pytest.mark.slow,
    # MaxText and the libraries that it imports warn of what they will change.
    pytest.mark.filterwarnings("ignore"),
]

WIDTH, NEW = 12, 16
CLOSE = 5e-5  # in float32; embeddings that are not rounded for the logits differ by 6e-3
MODULES = {
    "package": "maxtext",
    "pyconfig": "maxtext.configs.pyconfig",
    "adapter": "maxtext.integration.tunix.tunix_adapter",
    "creation": "maxtext.utils.model_creation_utils",
    "utils": "maxtext.utils.maxtext_utils",
    "base": "tunix.rl.rollout.base_rollout",
    "common": "tunix.rl.common",
    "rollout": "jaxspec.integrations.tunix",
}
# MaxText's names and values beside those of config.json.
V, D, F, L, N, K, H = 128, 64, 96, 3, 4, 2, 16
SIZES = {
    "vocab_size": V, "base_emb_dim": D, "base_mlp_dim": F, "base_num_decoder_layers": L,
    "base_num_query_heads": N, "base_num_kv_heads": K, "head_dim": H,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L,
    "num_attention_heads": N, "num_key_value_heads": K, "head_dim": H,
    "hidden_act": "silu", "max_position_embeddings": 512, "eos_token_id": EOS,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
LLAMA |= CONFIG | {"rms_norm_eps": 1e-5, "rope_theta": 5e5}
SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LLAMA31 = LLAMA | {"rope_scaling": SCALING}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
QWEN3 |= CONFIG | {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_bias": False}
TIED = QWEN3 | {"tie_word_embeddings": True}

# The model's name in MaxText, its layout, what its config.json has, and what MaxText is told.
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama3.1": ("llama3.1-8b", "maxtext.llama3.1", LLAMA31, {}),
    "llama3.1, unscanned": ("llama3.1-8b", "maxtext.llama3.1", LLAMA31, {"scan_layers": False}),
    "llama3.1, unscaled": ("llama3.1-8b", "maxtext.llama3.1", LLAMA, {"rope_use_scale": False}),
    "rope_type": ("llama3-8b", "maxtext.llama3.1", LLAMA31, {"rope_type": "llama3.1"}),
    "llama3": ("llama3-8b", "maxtext.llama", LLAMA, {}),
    "llama3, unscanned": ("llama3-8b", "maxtext.llama", LLAMA, {"scan_layers": False}),
    "llama3.3": ("llama3.3-70b", "maxtext.llama", LLAMA, {}),
    "llama2": ("llama2-7b", "maxtext.llama", LLAMA | {"rope_theta": 1e4}, {}),
    "qwen3": ("qwen3-8b", "maxtext.qwen3", QWEN3, {}),
    "qwen3, unscanned": ("qwen3-8b", "maxtext.qwen3", QWEN3, {"scan_layers": False}),
    "qwen3, tied": ("qwen3-0.6b", "maxtext.qwen3", TIED, {}),
    "qwen3, tied, unscanned": ("qwen3-0.6b", "maxtext.qwen3", TIED, {"scan_layers": False}),
}


@pytest.fixture(scope="module")
def maxtext() -> Any:
    try:
        found = {name: importlib.import_module(path) for name, path in MODULES.items()}
    except ModuleNotFoundError as error:
        pytest.skip(f"MaxText or Tunix cannot be imported ({error}): CONTRIBUTING.md says how")
    return SimpleNamespace(**found)


def make(maxtext: Any, folder: Path, name: str, **changes: Any) -> tuple[nnx.Module, Any]:
    """A small model of this name in float32 with random weights, and its config."""
    values: dict[str, Any] = {
        "run_name": "test", "base_output_directory": str(folder), "enable_checkpointing": False,
        "skip_jax_distributed_system": True, "override_model_config": True, "model_name": name,
        "dtype": "float32", "weight_dtype": "float32", "attention": "dot_product",
        "per_device_batch_size": 1, "max_target_length": 64, "scan_layers": True,
    }  # fmt: skip
    file = Path(maxtext.package.__file__).parent / "configs/base.yml"
    config = maxtext.pyconfig.initialize([None, str(file)], **values | SIZES | changes)
    mesh = maxtext.utils.get_mesh_from_config(config, jax.devices()[:1])
    with mesh, logical_axis_rules(config.logical_axis_rules):
        model = maxtext.creation.get_nnx_create_model_fn(config, mesh, rng_key=jax.random.key(0))()
    random = np.random.default_rng(1)

    def moved(leaf: Any) -> Any:
        """Norms are 1 at first, which would hide that they are in another's place."""
        return leaf + jnp.asarray(random.normal(size=leaf.shape) * 0.1, leaf.dtype)

    nnx.update(model, jax.tree.map(moved, nnx.state(model, nnx.Param)))
    return model, SimpleNamespace(mesh=mesh, rules=config.logical_axis_rules)


def called(model: nnx.Module, place: Any, *, jit: bool) -> Callable[[jax.Array], jax.Array]:
    """The logits of a model for tokens [B, T]."""

    def logits(state: nnx.State, tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        whole: Any = nnx.merge(graph, state)
        return whole(decoder_input_tokens=tokens, decoder_positions=positions)

    graph, state = nnx.split(model)
    run = functools.partial(jax.jit(logits) if jit else logits, state)

    def placed(tokens: jax.Array) -> jax.Array:
        with place.mesh, logical_axis_rules(place.rules):
            return run(tokens)

    return placed


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_maxtext(maxtext: Any, tmp_path: Path, case: str):
    name, layout, config, changes = CASES[case]
    model, place = make(maxtext, tmp_path, name, **changes)
    target = from_nnx(model, config, names=layout)
    found = [check_against(called(model, place, jit=jit), target) for jit in (True, False)]
    assert max(found) < CLOSE


def test_a_layout_of_another_rotary_embedding_is_refused(maxtext: Any, tmp_path: Path):
    """By MaxText's config; and of a state alone, by the logits."""
    for name, config, right, wrong in (
        ("llama3.1-8b", LLAMA31, "maxtext.llama3.1", "maxtext.llama"),
        ("llama3-8b", LLAMA, "maxtext.llama", "maxtext.llama3.1"),
    ):
        model, place = make(maxtext, tmp_path, name)
        with pytest.raises(ValueError, match=f"give names='{right}'"):
            from_nnx(model, config, names=wrong)
        target = from_nnx(nnx.state(model, nnx.Param), config, names=wrong)
        with pytest.raises(ValueError, match="first token's agree: look at the rotary"):
            check_against(called(model, place, jit=True), target)


@pytest.mark.parametrize("case", ["llama3.1", "qwen3", "qwen3, tied", "qwen3, tied, unscanned"])
def test_rollouts_are_those_of_tunix_adapter(maxtext: Any, tmp_path: Path, case: str):
    name, layout, raw, changes = CASES[case]
    model, place = make(maxtext, tmp_path, name, **changes)
    actor = maxtext.adapter.TunixMaxTextAdapter(model)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    options = RolloutOptions(
        tmp_path, "ngram", names=layout, engine=EngineConfig(max_rows=4), warm_up=False
    )
    config = maxtext.base.RolloutConfig(
        max_tokens_to_generate=NEW,
        max_prompt_length=WIDTH,
        kv_cache_size=64,
        temperature=1.0,
        return_logprobs=True,
    )
    given = {"tokenizer": LetterTokenizer(), "mesh": place.mesh, "rollout_config": config}
    with place.mesh, logical_axis_rules(place.rules):
        rollout = maxtext.rollout.JaxspecRollout(rollout_actor=actor, **given, options=options)
        for scale in (1.0, 1.1):
            state = jax.tree.map(lambda leaf, by=scale: leaf * by, nnx.state(actor, nnx.Param))
            nnx.update(actor, state)
            rollout.update_params(state, (nnx.Param,))
            output = rollout.generate(["jaxspec", "a"] * 2, config)
            padded = np.stack([np.pad(ids, (0, NEW - len(ids))) for ids in output.tokens])
            expected = maxtext.common.compute_per_token_logps(
                *nnx.split(actor),
                prompt_tokens=jnp.asarray(output.left_padded_prompt_tokens),
                completion_tokens=jnp.asarray(padded),
                pad_id=PAD,
                eos_id=EOS,
            )
            for row, ids in enumerate(output.tokens):
                wanted = expected[row, : len(ids)]
                np.testing.assert_allclose(output.logprobs[row], wanted, atol=CLOSE)
    assert rollout.engine.version == 2
