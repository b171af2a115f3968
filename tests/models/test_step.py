"""Step 3.5 and 3.7: their MTP layers, the forms of their files, and what is refused.

test_parity.py compares the model's logits with those of transformers, test_families_under_load.py
texts of speculation with those of plain decoding.
"""

import copy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from jaxspec import LLM, SamplingParams
from jaxspec.checkpoints.mtp import load_mtp_head, save_mtp_head
from jaxspec.config.experts import LimitedSwiglu
from jaxspec.config.mlps import DenseConfig
from jaxspec.config.mtp import BEFORE
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import EagleDrafter, NoDrafter
from jaxspec.functional import EngineParams
from jaxspec.models.from_config.model import load_model_config, parse_model_config
from jaxspec.models.heads import DraftHead
from jaxspec.models.json.values import read_json
from jaxspec.parallel import make_mesh
from jaxspec.training.heads.step import init_mtp_layer
from tests.helpers.alias_checkpoints import SIZES, STEP
from tests.helpers.checkpoints import (
    changed_copy,
    near_one,
    normal,
    save_random_model,
    save_tensors,
)
from tests.helpers.marks import LEFT_OUT
from tests.helpers.parity import assert_close, load, paged_head_logits
from tests.helpers.random_experts import random_expert_target
from tests.helpers.random_models import generate, mtp_head, noisy, random_prompts

TOKENS = np.random.default_rng(0).integers(0, 320, (2, 30))
VISION = {"width": 32, "layers": 1, "heads": 2, "image_size": 28}
# The lists have an entry for an MTP layer, which is unlike the model's last layer.
WITH_MTP: dict[str, Any] = STEP | {
    "layer_types": [*STEP["layer_types"], "sliding_attention"],
    "rope_theta": [*STEP["rope_theta"], 1e4],
    "partial_rotary_factors": [*STEP["partial_rotary_factors"], 1.0],
    "swiglu_limits": [*STEP["swiglu_limits"], 0.0],
    "swiglu_limits_shared": [*STEP["swiglu_limits_shared"], 0.2],
    "num_nextn_predict_layers": 1,
}
PUBLISHED: dict[str, Any] = SIZES | WITH_MTP
OWN = "model.layers.3."
OUTPUT = f"{OWN}transformer.shared_head.output.weight"


def whole(text: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "step3p7", "text_config": text, "vision_config": VISION}


def config_of_all_layers() -> transformers.Step3p7Config:
    """Of a model whose last layer is that of the MTP layer."""
    text = PUBLISHED | {"num_hidden_layers": 4, "num_nextn_predict_layers": 0}
    return transformers.Step3p7Config(**copy.deepcopy(whole(text)), tie_word_embeddings=False)


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, np.ndarray]:
    """A checkpoint with an MTP layer, named as published; the hidden states of all tokens but the
    last, which it reads, and its logits by transformers."""
    path = save_random_model(tmp_path_factory.mktemp("step"), config_of_all_layers())
    rng = np.random.default_rng(2)
    joins = {
        "enorm": near_one(rng, 64) - 1,
        "hnorm": near_one(rng, 64) - 1,
        "eh_proj": normal(rng, 64, 128),
        "transformer.shared_head.norm": near_one(rng, 64) - 1,
        "transformer.shared_head.output": normal(rng, 320, 64),
    }
    added = {f"{OWN}{name}.weight": x.astype(np.float32) for name, x in joins.items()}
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    changed_copy(path, path, {"text_config": PUBLISHED}, **added)
    hidden, logits = mtp_logits(model, {name: torch.from_numpy(x) for name, x in added.items()})
    return path, hidden, logits


def mtp_logits(model: Any, added: dict[str, torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """A model whose last layer, norm and LM head are those of an MTP layer, and whose last layer
    reads what that one reads."""
    text, ids, read = model.model.language_model, torch.from_numpy(TOKENS), []

    def normed(name: str, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return x * scale * (1 + added[f"{OWN}{name}.weight"])

    def joined(_: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        read.append(given[0])
        parts = normed("enorm", text.embed_tokens(ids[:, 1:])), normed("hnorm", given[0])
        return (torch.cat(parts, -1) @ added[f"{OWN}eh_proj.weight"].T, *given[1:])

    text.layers[3].register_forward_pre_hook(joined)
    with torch.no_grad():
        text.norm.weight.copy_(added[f"{OWN}transformer.shared_head.norm.weight"])
        model.lm_head.weight.copy_(added[OUTPUT])
        logits = model(ids[:, :-1]).logits.numpy()
    return read[0].numpy(), logits


@pytest.mark.filterwarnings(LEFT_OUT)
def test_an_mtp_layer_has_its_own_kind_of_layer_and_lm_head(with_mtp):
    """Over pages, token by token. It has more heads than the model's last layer, and a window."""
    path, hidden, expected = with_mtp
    config = load_model_config(path)
    assert config.mtp is not None
    head, target = load_mtp_head(path, config, jnp.dtype("float32")), load(path)
    [layer] = head.config.layers
    assert (layer.attention.num_heads, layer.attention.window) == (8, 8)
    assert layer.mlp == DenseConfig(128, activation=LimitedSwiglu(0.2))
    found = paged_head_logits(head, target, TOKENS[:, 1:], hidden, 3, 1)
    assert_close(found, expected)
    assert not head.recycle_normed and head.capture == (3,)  # states before norms


def own_head(path: Path) -> DraftHead:
    return load_mtp_head(path, load_model_config(path), jnp.dtype("float32"))


@pytest.mark.filterwarnings(LEFT_OUT)
def test_an_lm_head_that_is_a_copy_is_not_read(with_mtp, tmp_path: Path):
    tensors = load_file(with_mtp[0] / "model.safetensors")
    copied: dict[str, Any] = {OUTPUT: tensors["lm_head.weight"]}
    assert own_head(changed_copy(with_mtp[0], tmp_path / "copied", **copied)).lm_head is None
    absent: dict[str, Any] = {OUTPUT: None}
    assert own_head(changed_copy(with_mtp[0], tmp_path / "absent", **absent)).lm_head is None
    assert own_head(with_mtp[0]).lm_head is not None


@pytest.mark.filterwarnings(LEFT_OUT)
def test_an_mtp_layer_is_written_as_it_was_read(with_mtp, tmp_path: Path):
    """By itself, with its LM head."""
    path = with_mtp[0]
    head = own_head(path)
    save_mtp_head(head, tmp_path, read_json(path / "config.json"))
    again = load_mtp_head(tmp_path, load_model_config(path), jnp.dtype("float32"))
    same = jax.tree.map(np.array_equal, again, head)
    assert all(jax.tree.leaves(same))


@pytest.mark.filterwarnings(LEFT_OUT)
def test_step_3_5_is_the_text_model_of_step_3_7(with_mtp, tmp_path: Path):
    tensors = load_file(with_mtp[0] / "model.safetensors")
    alone = {name: x for name, x in tensors.items() if name.startswith(("model.layers", "lm_head"))}
    alone |= {name: tensors[name] for name in ("model.norm.weight", "model.embed_tokens.weight")}
    save_tensors(tmp_path, alone, PUBLISHED | {"architectures": ["Step3p5ForCausalLM"]})
    ours, theirs = load(tmp_path), load(with_mtp[0])
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, ours, theirs)))


@pytest.mark.slow
def test_drafts_of_an_mtp_layer_with_an_lm_head_change_no_text():
    config = parse_model_config(PUBLISHED | {"vocab_size": 96, "eos_token_id": None})
    model, prompts, found = random_expert_target(config), random_prompts((20, 9), vocab=96), []
    head = mtp_head(model, states=BEFORE)
    head = head.replace(lm_head=noisy(model.lm_head, 0.1))
    shape, plain = SpeculationConfig(num_nodes=8, max_depth=3, top_k=2), SpeculationConfig.chain(0)
    for drafter, speculation in ((NoDrafter(), plain), (EagleDrafter(head=head), shape)):
        params = EngineParams(target=model, drafter=drafter, speculation=speculation)
        texts, state = generate(params, prompts, page_size=5, max_lens=[60, 49])
        found.append(texts)
    assert head.config.layers[0].attention.num_heads == 8
    assert state.rows.stats.accepted[:, 1].sum() > 4, "hardly a draft was accepted"
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.filterwarnings(LEFT_OUT)
def test_two_devices_draft_as_one_does(with_mtp):
    """With the MTP layer whole, and split with its LM head."""
    prompts = [TOKENS[0].tolist(), TOKENS[1, :9].tolist()]
    two = {"mesh": make_mesh(tensor_parallel=2)}
    ways: list[tuple[str, dict[str, Any]]] = [("none", {}), ("mtp", {}), ("mtp", two)]
    found = []
    for drafter, options in [*ways, ("mtp", two | {"shard_drafter": True})]:
        llm = LLM(with_mtp[0], drafter, dtype="float32", max_length=64, **options)
        outputs = llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
        found.append([(one.token_ids, one.num_rounds) for one in outputs])
    plain, one, *others = found
    assert [text for text, _ in one] == [text for text, _ in plain]
    assert others == [one, one]


def test_an_mtp_layer_is_not_trained_where_no_layer_is_like_it():
    config = parse_model_config(PUBLISHED)
    assert config.mtp is not None
    with pytest.raises(ValueError, match="describes one that is like none of them"):
        init_mtp_layer(random_expert_target(config), config.mtp)


def test_what_transformers_saves_is_the_same_model():
    saved = transformers.Step3p7Config(**copy.deepcopy(whole(PUBLISHED))).to_dict()
    assert "per_layer_config" in saved["text_config"]
    assert "attention_other_setting" not in saved["text_config"]
    ours, theirs = parse_model_config(whole(PUBLISHED)), parse_model_config(saved)
    assert ours.layers == theirs.layers
    # It leaves out the MTP layers' limits.
    assert ours.mtp is not None and theirs.mtp is not None
    assert ours.mtp.layers[0].mixer == theirs.mtp.layers[0].mixer


def test_mtp_layers_that_no_list_describes_are_like_the_last_layer():
    config = parse_model_config(SIZES | STEP | {"num_nextn_predict_layers": 2})
    assert config.mtp is not None and config.mtp.layers == ()
    with pytest.raises(ValueError, match="layer_types has 1 of 2 MTP layers"):
        parse_model_config(PUBLISHED | {"num_nextn_predict_layers": 2})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_num_experts": 4, "n_routed_experts": 8}, "contradicts n_routed_experts (= 8)"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types: 'chunked_attention' is not"),
        ({"rope_theta": [1e4]}, "rope_theta has 1 entries for 3 layers"),
        ({"rope_theta": [1e4, 0, 1e4]}, "rope parameter rope_theta must be a number above 0"),
        ({"partial_rotary_factors": 0.5}, "partial_rotary_factors must be a list, got 0.5"),
        ({"partial_rotary_factors": [2.0] * 3}, "partial_rotary_factor must be above 0, at most 1"),
        ({"swiglu_limits": [-1.0] * 3}, "swiglu_limits must have numbers from 0 on, got -1.0"),
        ({"swiglu_limits_shared": [7.0]}, "swiglu_limits_shared has 1 entries for 3 layers"),
        ({"moe_layers_enum": "1,x"}, "moe_layers_enum must be numbers of layers, got '1,x'"),
        ({"moe_layers_enum": [9]}, "moe_layers_enum has [9], and the model 3 layers"),
        ({"sliding_window": None}, "has sliding_attention, but no sliding_window is in use"),
        ({"attention_other_setting": {"num_attention_heads": 5}}, "must be a multiple of num_key"),
        ({"attention_other_setting": {"head_dim": 16}}, "head_dim = 16 is not supported, only 32"),
        ({"attention_other_setting": {"sinks": 1}}, "attention_other_setting: unknown key 'sinks'"),
        ({"attention_other_setting": 3}, "attention_other_setting must be an object, got 3"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "contradicts the heads of sliding layers"),
        ({"rope_parameters": {"full_attention": {}}, "rope_theta": 1e4}, "must have full_attenti"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_theta is a list, and rope_parameters"),
        ({"yarn_only_types": ["sliding_attention"]}, "yarn_only_types = ['sliding_attention'] is"),
        ({"max_seq_len": 256}, "max_seq_len = 256 contradicts max_position_embeddings (= 512)"),
        ({"moe_router_activation": "softmax"}, "moe_router_activation = 'softmax' is not"),
        ({"use_rope_layers": [True, False, True]}, "use_rope_layers = [True, False, True] is not"),
        ({"share_expert_dim": 0}, "share_expert_dim must be a positive integer, got 0"),
        (
            {"layer_types": ["full_attention"] * 3, "mtp_layer_types": 3},
            "mtp_layer_types must be a",
        ),
        ({"mlp_layer_types": ["moe"] * 3}, "mlp_layer_types must be of dense and sparse"),
        ({"sparse_attention_config": {"a": 1}}, "unknown key 'sparse_attention_config'"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(change: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        parse_model_config(SIZES | STEP | change)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_one_error_names_everything():
    change = {"sink": True, "zero_centered": False, "swiglu_limits": [1.0], "rope_theta": [1.0]}
    with pytest.raises(ValueError) as caught:
        parse_model_config(SIZES | STEP | change)
    assert all(key in str(caught.value) for key in change)
