"""Families with recurrent layers, read from checkpoints: speculation does not change their text,
nor do devices, or requests that lose their pages. Further drafters, and texts that stop, are in
test_families_under_load.py. The fast guards are in tests/models: test_gated_delta.py runs such a
layer in an engine, test_mtp_parity.py compares MTP layers with those of transformers."""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoints.load import load
from jaxspec.checkpoints.safetensors_io import save_tree
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.mtp import BEFORE
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import NGramDrafter
from jaxspec.engine.engine import Engine
from jaxspec.models.decoder import Decoder
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.mixers import GatedDelta, KimiDelta, Mamba2, ShortConv
from jaxspec.models.nodes import map_nodes, nodes_of
from jaxspec.models.tensors import splitting
from jaxspec.parallel import make_mesh
from jaxspec.quantize.checkpoint import Checkpoint
from tests.helpers.marks import slow
from tests.helpers.random_experts import random_expert_target
from tests.helpers.random_models import mtp_head, random_prompts

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
EXPERTS = DELTA | {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
WIDE_HEADS = DELTA | {  # which the kernels take
    "model_type": "qwen3_5_text",
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 64,
}
TWO_LAYERS = DELTA | {  # fewer to compile
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
LFM2 = {  # a convolution is wider than most accepted paths are long
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 5,
    "conv_bias": True,
    "block_auto_adjust_ff_dim": False,
}
LFM2_MOE = {name: value for name, value in LFM2.items() if not name.startswith("block")} | {
    "num_dense_layers": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
}
BAMBA = {
    "attn_layer_indices": [1],
    "mamba_n_groups": 4,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_d_head": 8,
}
GRANITE = {
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_groups": 1,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_d_head": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 16,
    "shared_intermediate_size": 24,
    "residual_multiplier": 0.8,
    "position_embedding_type": "nope",
}
FALCON = {  # multipliers that change a random model's text
    "intermediate_size": 48,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_d_head": 8,
    "ssm_out_multiplier": 1.3,
    "ssm_multipliers": [0.8, 1.2, 1.1, 0.9, 0.7],
    "key_multiplier": 0.7,
    "mlp_multipliers": [1.2, 0.8],
    "lm_head_multiplier": 1.1,
}
NEMOTRON = {
    "num_hidden_layers": 5,
    "hybrid_override_pattern": "M-*EM",
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24,
    "moe_latent_size": 24,
    "num_nextn_predict_layers": 1,
}
# Weights of layers that give more than others: states that are not normed, squares of units.
CONTEXTS = {"falcon_h1": 0.03, "nemotron_h": 0.2}
DECAYING: Any = (GatedDelta, KimiDelta, Mamba2)  # mixers
KIMI = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 16,
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2],
        "num_heads": 4,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
    },
}
GLM = {  # recurrences that forget slowly, and many more pools than are chosen
    "layer_types": ["linear_attention", "deepseek_sparse_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "swiglu_limit": 0.5,
    "index_topk": 8,
    "index_kpool": 4,
    "index_head_dim": 8,
    "index_n_heads": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "linear_lower_bound": -0.3,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
}
LING: dict[str, Any] = {  # recurrences that forget slowly, and a limit that counts
    "layer_group_size": 2,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
    "kda_lower_bound": -0.3,
    "expert_swiglu_limit_list": [0, 0.1, 0.2],
    "share_expert_swiglu_limit_list": [0, 0, 0.3],
}
QWEN4: dict[str, Any] = {  # many more spans than are chosen, and one of few tokens ends a text
    **{key: value for key, value in EXPERTS.items() if key != "layer_types"},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "output_gate_type": "sigmoid",
    "hc_count": 2,
    "hc_lowrank": 8,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 24,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 4,
    "split_ngram_parts": 3,
    "indexer_n_heads": 16,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "eos_token_id": 39,
}
# Of MTP layers that are not Qwen's.
MTP: dict[str, Any] = {
    "nemotron_h": {"layout": "nemotron", "context": 0.05},
    "qwen4_exp_text": {"layout": "qwen4_exp", "states": BEFORE},
}
WITHOUT_MTP = (
    *("bamba", "one group", "two groups", "granite 4", "falcon_h1", "kimi_linear"),
    *("glm5_next_text", "bailing_hybrid", "lfm2", "lfm2_moe"),
)
CONFIGS = {
    "bamba": BAMBA,
    "one group": BAMBA | {"model_type": "bamba", "mamba_n_groups": 1},  # devices share it
    "two groups": BAMBA | {"model_type": "bamba", "mamba_n_groups": 2},
    "granite 4": GRANITE,
    "falcon_h1": FALCON,
    "nemotron_h": NEMOTRON,
    "kimi_linear": KIMI,
    "glm5_next_text": GLM,
    "bailing_hybrid": LING,
    "lfm2": LFM2,
    "lfm2_moe": LFM2_MOE,
    "qwen3_next": EXPERTS,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": EXPERTS,
    "qwen4_exp_text": QWEN4,
    "wide heads": WIDE_HEADS,
    "two layers": TWO_LAYERS,
}
CHAIN, TREE = SpeculationConfig.chain(4), SpeculationConfig(num_nodes=10, max_depth=3, top_k=3)
PROMPTS = [prompt.tolist() for prompt in random_prompts((5, 21, 1, 40))]
NEW_TOKENS = 45  # more than a fold of the recurrence
FEW = 26  # pages, of which all requests together need more


def raw_config(family: str) -> dict[str, Any]:
    return SIZES | {"model_type": family} | CONFIGS[family]


@functools.cache
def target(family: str) -> Decoder:
    """Nearly a bigram model, with recurrences that forget slowly."""
    context = CONTEXTS.get(family, 0.3)
    model = random_expert_target(parse_model_config(raw_config(family)), context=context)

    def slower(mixer: Any) -> Any:
        return mixer.replace(a_log=mixer.a_log - (3 if isinstance(mixer, KimiDelta) else 2))

    return map_nodes(model, slower, *DECAYING)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """family -> a checkpoint, with an MTP layer that guesses well; of LFM2 without such a layer"""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = path = tmp_path_factory.mktemp(family)
            model, extra = target(family), {}
            if family not in WITHOUT_MTP:
                head = mtp_head(model, **MTP.get(family, {"layout": "qwen"}))
                save_tree(path / "head", head, head.mapped("mtp.layers.0", splitting()), {})
                extra = load_file(path / "head" / "model.safetensors")
            save_tree(path, model, model.mapped(splitting()), raw_config(family), extra)
        return made[family]

    return make


def texts(
    model: Path,
    drafter: str,
    shape: SpeculationConfig = CHAIN,
    *,
    page_size: int = 5,
    num_pages: int | None = None,
    config: EngineConfig | None = None,
    dtype: str = "float32",
    **options: Any,
) -> list[list[int]]:
    """More prompts than rows, so rows join while others decode. Half of them are sampled."""
    own = NGramDrafter(min_match=1) if drafter == "ngram" else drafter
    params = load(model, own, dtype=dtype, speculation=shape, **options)
    cache = CacheConfig(page_size=page_size, max_length=96, num_pages=num_pages)
    engine = Engine(params, cache, config or EngineConfig(max_rows=3, rounds_per_call=4))
    sampling = [
        SamplingParams(max_tokens=NEW_TOKENS, temperature=0.7 * (index % 2), seed=index)
        for index in range(len(PROMPTS))
    ]
    generations = engine.add_all(PROMPTS, sampling)
    engine.finish(generations)
    assert not any(one.error for one in generations)
    if drafter != "none":
        accepting = sum(one.statistics.accepted[1] for one in generations)
        assert accepting > 4, "hardly a draft was accepted: this run tested little"
    if num_pages is not None:
        assert sum(engine.scheduler.preemptions.values()) > 0, "nobody lost its pages"
    return [one.token_ids for one in generations]


@functools.cache
def plain(model: Path, **options: Any) -> list[list[int]]:
    return texts(model, "none", **options)


@pytest.mark.gpu
@pytest.mark.parametrize(("drafter", "shape"), [("mtp", TREE), ("mtp", CHAIN), ("ngram", TREE)])
def test_kernels_of_recurrent_layers_change_no_text(checkpoint, drafter: str, shape: Any):
    model = checkpoint("wide heads")
    assert "delta_rule" in load(model, drafter, dtype="float32", speculation=shape).kernels
    expected = plain(model)
    assert texts(model, drafter, shape) == expected
    assert texts(model, drafter, shape, num_pages=FEW) == expected  # some lose their pages


@pytest.mark.parametrize(
    ("family", "drafter", "shape"),
    [
        slow("qwen3_next", "ngram+mtp", TREE),
        slow("qwen3_5_text", "mtp:before", CHAIN),
        slow("qwen3_5_moe_text", "ngram", TREE),
        slow("bamba", "ngram", CHAIN),
        slow("bamba", "ngram", TREE),
        slow("falcon_h1", "ngram", CHAIN),
        slow("falcon_h1", "ngram", TREE),
        slow("kimi_linear", "ngram", CHAIN),
        slow("kimi_linear", "ngram", TREE),
        slow("glm5_next_text", "ngram", CHAIN),
        slow("glm5_next_text", "ngram", TREE),
        slow("bailing_hybrid", "ngram", CHAIN),
        slow("bailing_hybrid", "ngram", TREE),
        slow("qwen4_exp_text", "ngram", TREE),
        slow("qwen4_exp_text", "mtp", CHAIN),
        slow("qwen4_exp_text", "mtp", TREE),
        slow("nemotron_h", "ngram", TREE),
        slow("nemotron_h", "mtp", CHAIN),
        slow("lfm2", "ngram", CHAIN),
        slow("lfm2", "ngram", TREE),
        slow("lfm2_moe", "ngram", TREE),
    ],
)
def test_text_is_that_of_plain_decoding(checkpoint, family: str, drafter: str, shape: Any):
    model = checkpoint(family)
    assert texts(model, drafter, shape) == plain(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "drafter", "shape"),
    [
        ("qwen3_next", "none", CHAIN),
        ("qwen3_next", "ngram", CHAIN),
        ("qwen3_next", "mtp", CHAIN),
        ("qwen3_next", "mtp", TREE),
        ("bamba", "ngram", TREE),
        ("falcon_h1", "ngram", TREE),
        ("kimi_linear", "ngram", TREE),
        ("glm5_next_text", "ngram", TREE),
        ("bailing_hybrid", "ngram", TREE),
        ("qwen4_exp_text", "mtp", TREE),
        ("nemotron_h", "mtp", TREE),
        ("lfm2", "none", CHAIN),
        ("lfm2", "ngram", TREE),
    ],
)
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_requests_that_lose_their_pages_have_the_same_text(
    checkpoint, preemption: Any, family: str, drafter: str, shape: SpeculationConfig
):
    model = checkpoint(family)
    config = EngineConfig(max_rows=3, rounds_per_call=4, preemption=preemption)
    found = texts(model, drafter, shape, num_pages=FEW, config=config)
    assert found == plain(model)


@pytest.mark.parametrize(
    ("family", "devices", "shape"),
    [
        slow("qwen3_next", {"tensor_parallel": 2}, TREE),
        slow("qwen3_next", {"tensor_parallel": 4}, CHAIN),  # KV heads are repeated
        slow("qwen3_next", {"tensor_parallel": (2, 2)}, CHAIN),
        slow("qwen3_next", {"data_parallel": 2}, CHAIN),
        slow("qwen3_5_text", {"tensor_parallel": 2}, CHAIN),
        slow("qwen3_5_text", {"tensor_parallel": 4}, TREE),
        slow("qwen3_5_moe_text", {"tensor_parallel": 2}, TREE),
        slow("qwen3_5_moe_text", {"tensor_parallel": 4}, CHAIN),
        slow("bamba", {"tensor_parallel": 2}, TREE),
        slow("bamba", {"tensor_parallel": 4}, CHAIN),
        slow("bamba", {"tensor_parallel": (2, 2)}, CHAIN),
        slow("one group", {"tensor_parallel": 2}, TREE),
        slow("two groups", {"tensor_parallel": 4}, TREE),
        slow("two groups", {"tensor_parallel": (2, 2)}, CHAIN),
        slow("granite 4", {"tensor_parallel": 2}, TREE),
        slow("granite 4", {"tensor_parallel": (2, 2)}, CHAIN),
        slow("falcon_h1", {"tensor_parallel": 2}, TREE),
        slow("falcon_h1", {"tensor_parallel": (2, 2)}, CHAIN),
        slow("falcon_h1", {"data_parallel": 2}, CHAIN),
        slow("kimi_linear", {"tensor_parallel": 2}, TREE),
        slow("kimi_linear", {"tensor_parallel": (2, 2)}, CHAIN),
        slow("glm5_next_text", {"tensor_parallel": 2}, TREE),
        slow("glm5_next_text", {"tensor_parallel": (2, 2)}, CHAIN),
        slow("glm5_next_text", {"data_parallel": 2}, CHAIN),
        slow("bailing_hybrid", {"tensor_parallel": 2}, TREE),
        slow("bailing_hybrid", {"tensor_parallel": (2, 2)}, CHAIN),
        slow("qwen4_exp_text", {"tensor_parallel": 2}, TREE),
        slow("qwen4_exp_text", {"tensor_parallel": 4}, CHAIN),
        slow("qwen4_exp_text", {"tensor_parallel": (2, 2)}, CHAIN),
        slow("qwen4_exp_text", {"data_parallel": 2}, TREE),
        slow("nemotron_h", {"tensor_parallel": 2}, TREE),
        slow("nemotron_h", {"tensor_parallel": (2, 2)}, CHAIN),
        slow("lfm2", {"tensor_parallel": 2}, TREE),
        slow("lfm2", {"tensor_parallel": 4}, CHAIN),
        slow("lfm2", {"tensor_parallel": (2, 2)}, TREE),
        slow("lfm2", {"data_parallel": 2}, CHAIN),
        slow("lfm2_moe", {"tensor_parallel": 2}, TREE),
    ],
)
def test_devices_give_the_text_of_one(checkpoint, family: str, devices: Any, shape: Any):
    """Key heads, channels of convolutions and experts are split."""
    model, mesh = checkpoint(family), make_mesh(**devices)
    drafter = "ngram" if family in WITHOUT_MTP else "mtp"
    assert texts(model, drafter, shape, mesh=mesh) == plain(model)
    if drafter == "mtp" and devices.get("tensor_parallel") in (2, 4):
        assert texts(model, "mtp", shape, mesh=mesh, shard_drafter=True) == plain(model)


@pytest.mark.parametrize("family", ["qwen3_5_text", slow("lfm2")])
def test_what_recurrent_layers_cannot_do_is_named(checkpoint, family: str):
    model = checkpoint(family)
    with pytest.raises(ValueError, match="recurrent layers need whole sequences on a device"):
        texts(model, "ngram", page_size=4, mesh=make_mesh(sequence_parallel=2))
    with pytest.raises(ValueError, match="recurrent layers cannot be split into stages: take pp 1"):
        texts(model, "ngram", mesh=make_mesh(pipeline_parallel=2))
    with pytest.raises(ValueError, match="this draft model"):
        texts(model, str(model))
    with pytest.raises(ValueError, match="which are not quantized"):
        Checkpoint(model)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen4_exp_text"])
def test_caches_of_eight_bits(checkpoint, family: str):
    model = checkpoint(family)
    assert texts(model, "mtp", TREE, kv_dtype="fp8") == plain(model, kv_dtype="fp8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "drafters"),
    [
        ("qwen3_5_text", ("mtp", "ngram")),
        ("bamba", ("ngram",)),
        ("falcon_h1", ("ngram",)),
        ("kimi_linear", ("ngram",)),
        ("glm5_next_text", ("ngram",)),
        ("bailing_hybrid", ("ngram",)),
        ("qwen4_exp_text", ("mtp",)),
        ("nemotron_h", ("mtp",)),
        ("lfm2", ("ngram",)),
    ],
)
def test_texts_are_deterministic_in_bfloat16(checkpoint, family: str, drafters: tuple[str, ...]):
    """Plain with one row, then drafted with three."""
    model, own = checkpoint(family), {"rounds_per_call": 4, "deterministic": True}
    chain, tree = (dataclasses.replace(shape, verify_width=16) for shape in (CHAIN, TREE))
    alone = EngineConfig(max_rows=1, **own)
    expected = texts(model, "none", chain, config=alone, dtype="bfloat16")
    for drafter, shape in itertools.product(drafters, (chain, tree)):
        config = EngineConfig(max_rows=3, **own)
        assert texts(model, drafter, shape, config=config, dtype="bfloat16") == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_5_text", "bamba", "falcon_h1", "kimi_linear", "glm5_next_text", "bailing_hybrid"),
        *("nemotron_h", "lfm2"),
    ],
)
def test_the_recurrences_matter(checkpoint, family: str):
    """Else the other tests would test little."""
    whole = target(family)
    first, *others = whole.layers

    def silenced(mixer: Any) -> Any:
        return mixer.replace(o=mixer.o.replace(weight=0 * mixer.o.weight))

    silent = map_nodes(first, silenced, *DECAYING, ShortConv)
    model = checkpoint(family)
    path = model / "silent"
    changed = whole.replace(layers=(silent, *others))
    save_tree(path, changed, changed.mapped(splitting()), raw_config(family))
    assert plain(path) != plain(model)
    assert all(jnp.exp(mixer.a_log).min() < 0.2 for mixer in nodes_of(first, *DECAYING))
