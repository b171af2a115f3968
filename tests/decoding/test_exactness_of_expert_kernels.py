"""With the Hopper kernels, models with experts, latents and recurrences have plain decoding's text.

In bfloat16 at a fixed width, as in test_exactness_of_kernels.py: there verification's attention is
the reference, also that to latents, whose kernel reads prompts and drafts. Experts and recurrent
layers run as kernels everywhere. Deterministic engines read prompts with the reference, too. The
tests without a mark look for the kernels in the programs of the tests of texts, lowered for a GPU.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from jaxspec import functional
from jaxspec.config.mtp import AFTER, MtpConfig, MtpLayout
from jaxspec.config.recurrent import GatedDeltaConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import Drafter, EagleDrafter, NGramDrafter, NoDrafter
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder, decoder_shapes
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.heads import head_shapes, mtp_head_config
from pallas_kernels.selection import OPERATIONS, Kernels
from tests.decoding.test_exactness_of_kernels import PAGE, WIDTH, check_engines
from tests.helpers.marks import slow
from tests.helpers.random_experts import random_expert_target
from tests.helpers.random_models import (
    PREFILL_WIDTH,
    empty_state,
    generate,
    mtp_head,
    random_prompts,
)

# Sizes that every kernel takes: heads of 128, experts of a multiple of 64, and 128 of them.
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 64}


class Case(NamedTuple):
    """A family: its config, the layout of its MTP layer, and the kernels of its mixers."""

    config: dict[str, Any]
    mtp: MtpLayout | None
    reading: frozenset[str]  # where prompts are read
    rounds: frozenset[str]  # of lookup
    drafting: frozenset[str]  # further ones of rounds of MTP layers


ATTENTION, LATENT = frozenset({"paged_attention"}), frozenset({"latent_attention"})
FAMILIES = {
    "qwen3_moe": Case(
        EXPERTS | {"norm_topk_prob": True}, None, ATTENTION, frozenset(), frozenset()
    ),
    "deepseek_v3": Case(
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "kv_lora_rank": 128,
            "q_lora_rank": 64,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "head_dim": 64,
            "v_head_dim": 64,
            "first_k_dense_replace": 1,
            "n_routed_experts": 128,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 64,
            "n_group": 4,
            "topk_group": 2,
        },
        "deepseek",
        LATENT,
        frozenset(),
        LATENT,
    ),
    "qwen3_5_moe_text": Case(
        EXPERTS
        | {
            "shared_expert_intermediate_size": 64,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        "qwen",
        ATTENTION | {"delta_run"},
        frozenset({"delta_read", "delta_commit"}),
        ATTENTION,
    ),
    "gpt_oss": Case(
        {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 40},
        None,
        ATTENTION,
        frozenset(),
        frozenset(),
    ),
}
MIXERS = ATTENTION | LATENT | {"delta_read", "delta_run", "delta_commit"}
# Routers with a correction or groups need more operations than a kernel of routes.
COMMON = {
    family: frozenset({"expert_product", "top_k" if family == "deepseek_v3" else "expert_routes"})
    for family in FAMILIES
}
NAMES = MIXERS | {"expert_product", "expert_routes", "top_k"}
KERNELS = Kernels(frozenset(OPERATIONS))
BFLOAT16 = jnp.dtype(jnp.bfloat16)
ROWS = 8
SHAPES = {
    "chain": SpeculationConfig(num_nodes=6, max_depth=5, top_k=1, verify_width=WIDTH),
    "tree": SpeculationConfig(num_nodes=20, max_depth=5, top_k=4, verify_width=WIDTH),
}
RUNS = [
    (family, drafter, shape)
    for family, case in FAMILIES.items()
    for drafter in ("ngram", *(["mtp"] if case.mtp else []))
    for shape in SHAPES
]


@functools.cache
def wide_target(family: str) -> Decoder:
    """In float32: nearly a bigram model, with recurrences that forget slowly."""
    raw = SIZES | {"model_type": family} | FAMILIES[family].config
    target = random_expert_target(parse_model_config(raw), context=0.2)

    def changed(layer: Any) -> Any:
        mixer = layer.mixer
        if isinstance(mixer.config, GatedDeltaConfig):
            return layer.replace(mixer=mixer.replace(a_log=mixer.a_log - 2))
        if mixer.o.bias is not None:  # random vectors are near 1: one token would be the likeliest
            mixer = mixer.replace(o=mixer.o.replace(bias=mixer.o.bias - 1))
        return layer.replace(mixer=mixer)

    return target.replace(layers=tuple(map(changed, target.layers)))


def cast[T](model: T, shapes: T) -> T:
    """Weights in the dtypes of a model in bfloat16, some of which are float32."""
    return jax.tree.map(lambda x, shape: x.astype(shape.dtype), model, shapes)


def params_of(family: str, drafter: str, shape: str) -> EngineParams:
    wide = wide_target(family)
    target = cast(wide, decoder_shapes(wide.config, BFLOAT16))
    own: Drafter = NGramDrafter(min_match=1) if drafter == "ngram" else NoDrafter()
    if drafter == "mtp":
        layout = FAMILIES[family].mtp
        assert layout is not None
        head = mtp_head(wide, noise=0.05, layout=layout)
        described = mtp_head_config(wide.config, MtpConfig(layout, 1, AFTER), 0)
        own = EagleDrafter(head=cast(head, head_shapes(described, wide.config, BFLOAT16)))
    return EngineParams(target=target, drafter=own, speculation=SHAPES[shape], kernels=KERNELS)


# On a CPU: which kernels the programs of these tests run.


def lowered_kernels(function: Any, *arguments: Any) -> set[str]:
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
    return {name for name in NAMES if any(f"{name}_kernel" in line for line in calls)}


@pytest.mark.parametrize(
    ("family", "drafter", "shape"),
    [
        ("qwen3_moe", "ngram", "chain"),  # of the others each kernel is lowered in tests/kernels
        slow("deepseek_v3", "mtp", "tree"),
        slow("qwen3_5_moe_text", "mtp", "tree"),
        slow("gpt_oss", "ngram", "chain"),
        *(slow(family, "mtp", "chain") for family in ("deepseek_v3", "qwen3_5_moe_text")),
        *(slow(family, "ngram", "tree") for family in FAMILIES),
    ],
)
def test_the_kernels_are_in_the_programs(family: str, drafter: str, shape: str):
    case, params = FAMILIES[family], params_of(family, drafter, shape)
    state = jax.eval_shape(lambda: empty_state(params, ROWS, 64, PAGE))
    read = functools.partial(functional.prefill, width=PREFILL_WIDTH, greedy=True)
    decode = functools.partial(functional.decode, max_rounds=4, greedy=True)
    counts = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    of_reading = lowered_kernels(read, params, state, None, counts)
    of_rounds = lowered_kernels(decode, params, state, 4)
    common = COMMON[family]
    assert of_reading == common | case.reading
    drafting = case.drafting if drafter == "mtp" else frozenset()
    of_trees = {"top_k"} - common  # of the drafter
    assert of_rounds - of_trees == common | case.rounds | drafting


# On a GPU.


@functools.cache
def plain_texts(family: str, shape: str) -> list[list[int]]:
    return texts(params_of(family, "none", shape))[0]


def texts(params: EngineParams) -> tuple[list[list[int]], float]:
    """Of greedy rows side by side, and the mean number of tokens a round."""
    vocab = params.target.config.vocab_size
    prompts = random_prompts((5, 1, 17, 9, 23, 2, 12, 30), vocab=vocab)
    found, state = generate(params, prompts, page_size=PAGE)
    stats = state.rows.stats
    return found, float(stats.accepted.sum() / stats.rounds.sum())


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "drafter", "shape"), RUNS)
def test_text_is_that_of_plain_decoding(family: str, drafter: str, shape: str):
    found, length = texts(params_of(family, drafter, shape))
    assert found == plain_texts(family, shape)
    assert length > 1.05, "hardly a draft was taken"


# Deterministic engines: prompts that begin alike, and too few pages.


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_no_text_changes_with_prefix_hits_and_swaps(family: str):
    drafter = "mtp" if FAMILIES[family].mtp else "ngram"
    check_engines(params_of(family, "none", "tree"), params_of(family, drafter, "tree"))
