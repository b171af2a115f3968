"""Random block heads of every published kind: files with the names, shapes and keys of their
publishers, written without jaxspec."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tests.helpers.checkpoints import save_tensors

HIDDEN, VOCAB, UNITS, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 101, 40, 4, 2, 16, 2
MASK, BLOCK, RANK, TARGET_LAYERS = 100, 6, 7, 3
PLACE = {"mask_token_id": MASK, "target_layer_ids": [0, 1]}
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWED = {"layer_types": [SLIDING, FULL], "sliding_window": 9, "use_sliding_window": True}
Shapes = dict[str, tuple[int, ...]]
Fields = dict[str, Any]


def _fields(architecture: str, nested: Fields, **more: Any) -> Fields:
    """The config.json of a head whose options are in ``dflash_config``."""
    return {
        "architectures": [architecture],
        "attention_bias": False,
        "block_size": BLOCK,
        "dflash_config": PLACE | nested,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": UNITS,
        "layer_types": [FULL] * LAYERS,
        "max_position_embeddings": 40960,
        "model_type": "qwen3",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "num_target_layers": TARGET_LAYERS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB,
    } | more


def _body() -> Shapes:
    shapes: Shapes = {"fc": (HIDDEN, 2 * HIDDEN), "hidden_norm": (HIDDEN,), "norm": (HIDDEN,)}
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for index in range(LAYERS):
        layer: Shapes = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_norm": (HEAD_DIM,),
            "self_attn.k_norm": (HEAD_DIM,),
            "self_attn.q_proj": (queries, HIDDEN),
            "self_attn.k_proj": (keys, HIDDEN),
            "self_attn.v_proj": (keys, HIDDEN),
            "self_attn.o_proj": (HIDDEN, queries),
            "mlp.gate_proj": (UNITS, HIDDEN),
            "mlp.up_proj": (UNITS, HIDDEN),
            "mlp.down_proj": (HIDDEN, UNITS),
        }
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def _convolutions(taps: int, group: int) -> Shapes:
    said = 2 * taps * HIDDEN // group
    names = [f"layers.{i}.{part}_conv." for i in range(LAYERS) for part in ("attention", "mlp")]
    shapes = {f"{name}base_kernel": (2, taps, HIDDEN) for name in names}
    return shapes | {f"{name}kernel_projection.weight": (said, HIDDEN) for name in names}


def _linear(name: str, out: int, width: int) -> Shapes:
    return {f"{name}.weight": (out, width), f"{name}.bias": (out,)}


def _markov(kind: str) -> Shapes:
    shapes: Shapes = {f"markov_head.markov_w{i}.weight": (VOCAB, RANK) for i in (1, 2)}
    if kind == "gated":
        shapes |= _linear("markov_head.gate_proj", RANK, HIDDEN + RANK)
    if kind == "rnn":
        shapes |= _linear("markov_head.joint_proj", 3 * RANK, HIDDEN + 2 * RANK)
    return shapes


def _dspark(kind: str) -> tuple[Fields, Shapes]:
    """SpecForge's: the same tensors as DeepSpec's."""
    nested = {
        "attention_mode": "gqa",
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "markov_head_type": kind,
        "markov_rank": RANK,
        "projector_type": "dspark",
    }
    confidence = _linear("confidence_head.proj", 1, HIDDEN + RANK)
    return _fields("DSparkDraftModel", nested), _body() | _markov(kind) | confidence


def _domino() -> tuple[Fields, Shapes]:
    state = 5
    nested = {
        "emb_dim": RANK,
        "gru_hidden_dim": state,
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "shift_label": True,
    }
    return _fields("DominoDraftModel", nested), _body() | {
        "prefix_gru.weight_ih_l0": (3 * state, HIDDEN),
        "prefix_gru.weight_hh_l0": (3 * state, state),
        "embed_proj.0.weight": (RANK, HIDDEN + state),
        "embed_proj.2.weight": (VOCAB, RANK),
    }


def _dflash2() -> tuple[Fields, Shapes]:
    nested = {
        "block_size": BLOCK,
        "conv_group_size": 8,
        "conv_kernel_size": 2,
        "final_logit_softcapping": 20.0,
        "output_multiplier": 0.5,
        "selector_rank": RANK,
        "selector_top_k": 9,
    }
    windows: Fields = {"layer_types": [SLIDING] * LAYERS, "sliding_window": 9}
    fields = _fields("DFlash2DraftModel", nested, is_causal=False, **windows)
    return fields, _body() | _convolutions(2, 8) | {
        "candidate_selector.predecessor_codebook": (VOCAB, RANK),
        "candidate_selector.successor_codebook": (VOCAB, RANK),
        "candidate_selector.hidden_projection.weight": (RANK, HIDDEN),
    }


def _lilicorr() -> tuple[Fields, Shapes]:
    width, heads, count, factor = 20, 2, 8, 6
    nested = {
        "lilicorr_candidate_topk": count,
        "lilicorr_enabled": True,
        "lilicorr_factor_dim": factor,
        "lilicorr_hidden_size": width,
        "lilicorr_logit_scale": 8.0,
        "lilicorr_mlp_ratio": 2,
        "lilicorr_num_heads": heads,
        "lilicorr_num_layers": LAYERS,
        "lilicorr_vector_eps": 1e-4,
    }
    shapes: Shapes = {
        "feature_mlp.0.weight": (5,),
        "feature_mlp.0.bias": (5,),
        "slot_embedding": (1, 1, BLOCK - 1, 1, width),
        "rank_embedding": (1, 1, 1, count, width),
        "relative_slot_bias": (heads, 2 * BLOCK - 1),
        "same_slot_bias": (heads,),
        "output_norm.weight": (width,),
        "anchor_norm.weight": (width,),
    }
    for index in range(LAYERS):
        layer = f"layers.{index}."
        shapes |= {f"{layer}{part}_norm.weight": (width,) for part in ("attn", "mlp")}
        shapes[f"{layer}attn.in_proj_weight"] = (3 * width, width)
        shapes[f"{layer}attn.in_proj_bias"] = (3 * width,)
        shapes |= _linear(f"{layer}attn.out_proj", width, width)
        shapes |= _linear(f"{layer}mlp.0", 2 * width, width)
        shapes |= _linear(f"{layer}mlp.2", width, 2 * width)
    for name, out, inputs in (
        ("token_proj", width, HIDDEN),
        ("pass_hidden_proj", width, HIDDEN),
        ("feature_mlp.1", width, 5),
        ("feature_mlp.3", width, width),
        ("context_proj", width, HIDDEN),
        ("factor_input_proj", width, 3 * width),
        *((f"{part}_head", factor, width) for part in ("out", "in", "anchor_out")),
    ):
        shapes |= _linear(name, out, inputs)
    fields = _fields("DFlashDraftModel", nested)
    return fields, _body() | {f"lilicorr.{name}": shape for name, shape in shapes.items()}


def _xpress() -> tuple[Fields, Shapes]:
    units = 9
    own = {
        "sample_from_anchor": False,
        "xpress_block_size": BLOCK,
        "xpress_mlp_hidden": units,
        "xpress_num_passes": 6,
        "xpress_rank": RANK,
        "xpress_topc": 512,
    }
    shapes: Shapes = {
        "w1.weight": (VOCAB, RANK),
        "w2.weight": (VOCAB, RANK),
        "down_h.weight": (RANK, HIDDEN),
        "down_g.weight": (RANK, HIDDEN),
        "in_proj.weight": (RANK, 3 * RANK),
        "mix.L": (RANK, BLOCK, BLOCK),
        "mlp.gate_proj.weight": (units, RANK),
        "mlp.up_proj.weight": (units, RANK),
        "mlp.down_proj.weight": (RANK, units),
    }
    named = {f"xpress_head.{name}": shape for name, shape in shapes.items()}
    return _fields("Qwen3XPressModel", {}, **own), _body() | named


def _dflash(nested: Fields, **more: Any) -> tuple[Fields, Shapes]:
    return _fields("DFlashDraftModel", nested, **more), _body()


PUBLISHED: Mapping[str, Callable[[], tuple[Fields, Shapes]]] = MappingProxyType(
    {
        "windowed": lambda: _dflash({}, **WINDOWED),
        "jetspec": lambda: _dflash({"causal_head": True}),
        "modelopt": lambda: _dflash({"causal": True, "swa_window_size": 9, "use_swa": True}),
        "vanilla": lambda: _dspark("vanilla"),
        "gated": lambda: _dspark("gated"),
        "rnn": lambda: _dspark("rnn"),
        "domino": _domino,
        "dflash2": _dflash2,
        "lilicorr": _lilicorr,
        "xpress": _xpress,
    }
)  # fmt: skip


def save_published(kind: str, directory: str | Path, seed: int = 0) -> Path:
    """A head of random weights for a target of these sizes."""
    fields, shapes = PUBLISHED[kind]()
    rng = np.random.default_rng(seed)
    tensors = {
        name: (0.3 * rng.standard_normal(shape) + name.endswith("norm.weight")).astype(np.float32)
        for name, shape in shapes.items()
    }
    return save_tensors(directory, tensors, fields)
