"""What block heads have beside DFlash's layers, read and written; errors where it does not fit."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec import SpeculationConfig
from jaxspec.checkpoints import load as loading
from jaxspec.checkpoints.block import holds_block_head, load_block_head, save_block_head
from jaxspec.checkpoints.safetensors_io import save_decoder
from jaxspec.decoding.drafters import BlockDrafter
from jaxspec.models.from_config.block_head import block_config
from jaxspec.models.json.values import read_json
from jaxspec.models.linear import Linear
from tests.helpers.block_heads import CORRECTED, arrays_equal, block_target, random_head
from tests.helpers.checkpoints import changed_copy, save_byte_tokenizer, save_tensors
from tests.helpers.marks import slow
from tests.helpers.random_models import tiny_config

FLOAT32 = jnp.dtype("float32")
TARGET = block_target(tiny_config(vocab_size=257, num_layers=3))


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for kind in CORRECTED:
        found[kind] = tmp_path_factory.mktemp(kind)
        save_block_head(random_head(TARGET.config, kind), found[kind], TARGET)
    return found


@pytest.mark.parametrize("kind", CORRECTED)
def test_a_head_is_written_and_read_bit_for_bit(kind: str, heads: dict[str, Path]):
    assert holds_block_head(heads[kind])
    head = load_block_head(heads[kind], TARGET.config, FLOAT32)
    assert arrays_equal(head, random_head(TARGET.config, kind))


def nested(**options: Any) -> dict[str, Any]:
    """A change of ``dflash_config``."""
    return {"dflash_config": options}


MISFITS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "no candidates": (
        "dflash2", nested(selector_top_k=0), {}, "selector_top_k must be a positive integer, got 0",
    ),
    "more candidates than tokens": (
        "dflash2", nested(selector_top_k=300), {}, "top_k is 300, and the target has 257 tokens",
    ),
    "groups of no size": (
        "dflash2", nested(conv_group_size=0), {}, "conv_group_size must be a positive integer",
    ),
    "uneven groups": (
        "dflash2", nested(conv_group_size=5), {}, "conv_group_size 5 does not divide the hidden_si",
    ),
    "a scale of nothing": (
        "dflash2", nested(output_multiplier=0), {}, "output_multiplier must be a positive number",
    ),
    "another rank": (
        "dflash2", nested(selector_rank=8), {}, r"codebook is \[257, 7\], not \[257, 8\]",
    ),
    "candidates that are no power of 2": (
        "lilicorr", nested(lilicorr_candidate_topk=6), {}, "must be a power of 2 up to 16, got 6",
    ),
    "too many candidates": (
        "lilicorr", nested(lilicorr_candidate_topk=32), {}, "must be a power of 2 up to 16, got 32",
    ),
    "an uneven transformer": (
        "lilicorr", nested(lilicorr_num_heads=3), {}, "lilicorr_num_heads 3 does not divide the hi",
    ),
    "no scale": (
        "lilicorr", nested(lilicorr_logit_scale=None), {}, "lilicorr_logit_scale must be a positiv",
    ),
    "a transformer of another depth": (
        "lilicorr", {}, {"lilicorr.slot_embedding": np.ones((1, 1, 4, 1, 20), np.float32)},
        r"slot_embedding is \[1, 1, 4, 1, 20\], not \[1, 1, 5, 1, 20\]",
    ),
    "a transformer that is switched off": (
        "lilicorr", nested(lilicorr_enabled=False), {}, "lilicorr_enabled must be true, got False",
    ),
    "no state": (
        "domino", nested(gru_hidden_dim=None), {}, "gru_hidden_dim must be a positive integer",
    ),
    "two ranks": ("domino", {"emb_dim": 7}, {}, "emb_dim is 9 inside dflash_config, and 7 beside"),
    "a prefix below nothing": (
        "domino", nested(pure_draft_prefix_len=-1), {}, "pure_draft_prefix_len must be an integer",
    ),
    "a block of another size": (
        "xpress", {"xpress_block_size": 9}, {}, "xpress_block_size is 9, and block_size 6",
    ),
    "no passes": (
        "xpress", {"xpress_num_passes": 0}, {}, "xpress_num_passes must be a positive integer",
    ),
    "another backbone": (
        "xpress", {"xpress_backbone": "dflash2"}, {}, "xpress_backbone = 'dflash2' is not suppo",
    ),
    "a refiner of two widths": (
        "xpress", {"xpress_mlp_hidden": 18, "xpress_mlp_ratio": 3}, {},
        "xpress_mlp_hidden is 18, and xpress_mlp_ratio times xpress_rank 27; remove the one that",
    ),
    "no refiner": ("xpress", {"xpress_rank": None}, {}, "xpress_rank must be a positive integer"),
    "no kernels": (
        "dflash2", {}, {"layers.1.mlp_conv.base_kernel": None}, "base_kernel is missing",
    ),
    "kernels that are not announced": (
        "dflash2", nested(conv_kernel_size=0, conv_group_size=0), {}, "is not part of this model",
    ),
    "misshapen kernels": (
        "dflash2", {}, {"layers.0.mlp_conv.base_kernel": np.ones((2, 2, 32), np.float32)},
        r"layers.0.mlp_conv.base_kernel is \[2, 2, 32\], not \[2, 3, 32\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_heads_that_do_not_fit(case: str, heads: dict[str, Path], tmp_path: Path):
    kind, config, tensors, message = MISFITS[case]
    raw = read_json(heads[kind] / "config.json")
    if "dflash_config" in config:
        config = {"dflash_config": raw["dflash_config"] | config["dflash_config"]}
    directory = changed_copy(heads[kind], tmp_path, config, **tensors)
    with pytest.raises(ValueError, match=message) as caught:
        load_block_head(directory, TARGET.config, FLOAT32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["domino", "lilicorr"])
def test_a_kind_may_be_said_by_its_options(kind: str, heads: dict[str, Path]):
    raw = read_json(heads[kind] / "config.json")
    options = raw["dflash_config"] | {"projector_type": kind}
    if kind == "domino":
        raw |= {"emb_dim": options["emb_dim"]}
    renamed = raw | {"architectures": ["DFlashDraftModel"], "dflash_config": options}
    assert block_config(renamed, TARGET.config) == block_config(raw, TARGET.config)


def test_a_refiner_as_the_speculators_library_writes_it(heads: dict[str, Path], tmp_path: Path):
    raw = read_json(heads["xpress"] / "config.json")
    own = {"architectures", "dflash_config", "block_size", "num_target_layers"}
    layers = {key: raw[key] for key in raw if key not in own and not key.startswith("xpress_")}
    config = {
        "architectures": ["XPressDraftModel"],
        "aux_hidden_state_layer_ids": [i + 1 for i in raw["dflash_config"]["target_layer_ids"]],
        "block_size": 6,
        "draft_vocab_size": 257,
        "mask_token_id": raw["dflash_config"]["mask_token_id"],
        "num_jacobi_passes": 6,
        "sample_from_anchor": False,
        "speculators_model_type": "xpress",
        "transformer_layer_config": layers,
        "xpress_mlp_ratio": 2,
        "xpress_rank": 9,
    }
    renamed = {"w1.weight": "token_embed.weight", "w2.weight": "readout.weight", "mix.L": "mix_l"}
    renamed |= {f"mlp.{x}_proj.weight": f"mlp_{x}.weight" for x in ("gate", "up", "down")}
    tensors = {}
    for name, tensor in load_file(heads["xpress"] / "model.safetensors").items():
        part = name.removeprefix("xpress_head.")
        tensors[name if part == name else f"refiner_head.{renamed.get(part, part)}"] = tensor
    with pytest.raises(ValueError, match="sample_from_anchor = True is not supported, only F"):
        block_config(config | {"sample_from_anchor": True}, TARGET.config)
    head = load_block_head(save_tensors(tmp_path, tensors, config), TARGET.config, FLOAT32)
    assert arrays_equal(head, load_block_head(heads["xpress"], TARGET.config, FLOAT32))


def test_scales_of_logits_are_the_heads_or_the_targets(heads: dict[str, Path]):
    raw = read_json(heads["dflash2"] / "config.json")
    said = raw | {"output_multiplier": 0.25, "final_logit_softcapping": 20.0}
    head = block_config(said, TARGET.config)
    assert (head.logit_scale, head.logit_softcap) == (0.25, 20.0)
    targets = tiny_config(vocab_size=257, num_layers=3)
    object.__setattr__(targets, "logit_divisor", 4.0)
    object.__setattr__(targets, "logit_softcap", 20.0)
    for config in (said, raw):
        head = block_config(config, targets)
        assert (head.logit_scale, head.logit_softcap) == (1.0, None)
    object.__setattr__(targets, "logit_softcap", 30.0)
    with pytest.raises(ValueError, match=r"softcapping 20\.0 are not the target's 0\.25 and 30\.0"):
        block_config(said, targets)


@pytest.mark.parametrize("bits", [slow(8), 4])
def test_corrections_are_not_rounded(bits: int, heads: dict[str, Path], tmp_path: Path):
    save_decoder(TARGET, tmp_path)
    chain = SpeculationConfig.chain(4)
    loaded = loading.load(tmp_path, heads["domino"], speculation=chain, drafter_bits=bits)
    assert isinstance(loaded.drafter, BlockDrafter)
    head, whole = loaded.drafter.head, load_block_head(heads["domino"], TARGET.config, FLOAT32)
    assert arrays_equal(head.correction, whole.correction)
    assert not isinstance(head.fc, Linear)


def test_a_tree_that_is_wider_than_the_candidates(heads: dict[str, Path], tmp_path: Path):
    save_decoder(TARGET, tmp_path)
    save_byte_tokenizer(tmp_path)
    wide = SpeculationConfig(num_nodes=20, max_depth=3, top_k=10)
    with pytest.raises(ValueError, match="top_k 10 is wider than this drafter's choice among 9 c"):
        loading.load(tmp_path, heads["dflash2"], speculation=wide)
