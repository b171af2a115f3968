"""Models with experts: speculation and devices that share them change no token (float32)."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec.checkpoints.load import load
from jaxspec.config.experts import ExpertsConfig, RoutingConfig
from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import EagleDrafter, NoDrafter
from jaxspec.decoding.sampling import make_sampling
from jaxspec.decoding.state import EngineState
from jaxspec.functional import EngineParams
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import Decoder
from jaxspec.models.forward_pass import make_pass
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.linear import Linear
from jaxspec.models.mlps import mix
from jaxspec.parallel import WHOLE, Layout, TensorParallel, make_mesh, mesh_layout, partition_specs
from pallas_kernels.selection import NO_KERNELS
from tests.helpers.layouts import on_mesh
from tests.helpers.marks import first_is_fast, slow
from tests.helpers.mtp_families import save_with_mtp
from tests.helpers.random_experts import expert_config, random_expert_target
from tests.helpers.random_models import generate, make_params, random_prompts
from tests.helpers.sampling_reference import reference_texts

PROMPTS = random_prompts((5, 1, 17, 9))
NEW_TOKENS = 40
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "eos_token_id": None,
}
# config.json of each family
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 9,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}
# With a window, which not all checkpoints of a family have.
WINDOWED: dict[str, dict[str, Any]] = {
    "mixtral-window": {"sliding_window": 9},
    "qwen3_moe-window": {"use_sliding_window": True, "sliding_window": 9},
}
# Routing of models whose attention comes later, or that no family here has.
KINDS = {
    "groups": ExpertsConfig(
        16,
        RoutingConfig(
            8, 3, "sigmoid", normalize=True, scale=1.5, num_groups=4, top_groups=2, correction=True
        ),
        shared_size=24,
        shared_gate=True,
    ),
}
ALL = (*FAMILIES, *KINDS)
CHAIN = SpeculationConfig.chain(4)
TREE = SpeculationConfig(num_nodes=12, max_depth=3, top_k=3)


@functools.cache
def target(kind: str) -> Decoder:
    if kind in KINDS:
        return random_expert_target(expert_config(KINDS[kind], num_heads=8))
    family = kind.removesuffix("-window")
    raw = SIZES | FAMILIES[family] | WINDOWED.get(kind, {}) | {"model_type": family}
    made = random_expert_target(parse_model_config(raw))
    if kind != "gpt_oss":
        return made
    assert isinstance(made.lm_head, Linear)  # its logits are so far apart that one token is written
    return made.replace(lm_head=made.lm_head.replace(weight=made.lm_head.weight / 3))


def texts(params: EngineParams, page_size: int = 4) -> list[list[int]]:
    """Two greedy rows, and two that sample."""
    sampling = make_sampling(
        4, temperature=np.array([0.0, 0.8, 0.8, 0.0], np.float32), seeds=np.arange(4)
    )
    limits = [len(prompt) + NEW_TOKENS for prompt in PROMPTS]
    found, state = generate(
        params, PROMPTS, page_size=page_size, sampling=sampling, max_lens=limits
    )
    check_acceptance(params, state)
    return found


def check_acceptance(params: EngineParams, state: EngineState) -> None:
    if not isinstance(params.drafter, NoDrafter):
        accepting = state.rows.stats.accepted[:, 1].sum()
        assert accepting > 4, "hardly a draft was accepted: this run tested little"


@functools.cache
def plain_texts(kind: str) -> list[list[int]]:
    return texts(make_params("none", SpeculationConfig.chain(1), target(kind)))


def test_greedy_text_is_that_of_plain_decoding():
    """The guard of the slow test below, in fewer programs."""
    params = make_params("ngram", CHAIN, target("gpt_oss"))
    found, state = generate(params, PROMPTS[:2], page_size=3, max_lens=[45, 41])
    check_acceptance(params, state)
    greedy = [SamplingParams(max_tokens=40)] * 2
    assert found == reference_texts(params.target, PROMPTS[:2], greedy, 45, found)


@pytest.mark.parametrize(
    ("kind", "drafter", "speculation"),
    [
        # test_families_under_load.py drafts with lookup, EAGLE-3 and MTP layers for FAMILIES.
        *(slow(kind, "ngram", shape) for kind in WINDOWED for shape in (CHAIN, TREE)),
        *(slow(kind, "eagle3", TREE) for kind in (*KINDS, *WINDOWED)),
        *(slow(kind, "draft_model", CHAIN) for kind in (*ALL, *WINDOWED)),
        *(slow(kind, "ngram", TREE) for kind in FAMILIES),
        slow("groups", "mixed", TREE),
    ],
)
def test_text_is_that_of_plain_decoding(kind: str, drafter: str, speculation: SpeculationConfig):
    params = make_params(drafter, speculation, target(kind))
    assert texts(params, page_size=3) == plain_texts(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WINDOWED)
def test_the_windows_matter(kind: str):
    """And every layer has its own."""
    mixers = [layer.mixer for layer in target(kind).config.layers]
    assert all(isinstance(one, AttentionConfig) and one.window == 9 for one in mixers)
    assert plain_texts(kind) != plain_texts(kind.removesuffix("-window"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["glm4_moe", "gpt_oss"])
def test_text_is_the_same_by_the_products_that_gpus_run(kind: str, monkeypatch: Any):
    expected = plain_texts(kind)
    jax.clear_caches()  # programs with the other products
    monkeypatch.setattr(mix, "blocks_of_experts", mix.every_expert)
    try:
        assert texts(make_params("eagle3", TREE, target(kind))) == expected
    finally:
        jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_the_experts_matter(kind: str):
    """Else the other tests would test little."""
    whole = target(kind)
    *others, last = whole.layers
    mlp: Any = last.mlp
    quiet = last.replace(mlp=mlp.replace(down=jax.tree.map(lambda leaf: 0 * leaf, mlp.down)))
    silent = whole.replace(layers=(*others, quiet))
    assert texts(make_params("none", SpeculationConfig.chain(1), silent)) != plain_texts(kind)


@first_is_fast(["gpt_oss", "groups", "mixtral", "qwen3_moe", "glm4_moe"])
def test_devices_add_up_one_layer(case: str):
    """The guard of the slow test below."""
    whole = target(case)
    mesh = make_mesh(4)
    layout, layer = mesh_layout(mesh), whole.layers[-1].mlp
    x = np.random.default_rng(0).standard_normal((2, 7, whole.config.hidden_size), np.float32)

    def run(mlp: Any, x: Any, layout: Layout) -> Any:
        positions, attend = jnp.zeros((2, 7), jnp.int32), dense_causal_attend
        step = make_pass(whole.config.layers, positions, attend, 1e-5, layout, NO_KERNELS)
        return mlp(x, step).partial_sums(layout, NO_KERNELS, lambda dtype, width: False)[0]

    split = jax.shard_map(
        functools.partial(run, layout=layout),
        mesh=mesh,
        in_specs=(partition_specs(layer, layout), P()),
        out_specs=P(),
        check_vma=False,
    )
    alone = jax.jit(functools.partial(run, layout=WHOLE))
    np.testing.assert_allclose(jax.jit(split)(layer, x), alone(layer, x), atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "devices", "sequence"),
    [
        *(slow(kind, 2, 1) for kind in ALL),
        *(slow(kind, 4, 1) for kind in ALL),
        slow("groups", (2, 2), 1),
        slow("gpt_oss", (2, 2), 1),
        slow("groups", 2, 2),
        slow("gpt_oss", 1, 2),
    ],
)
def test_devices_change_nothing(kind: str, devices: TensorParallel, sequence: int):
    params = make_params("eagle3", TREE, target(kind))
    mesh = make_mesh(devices, sequence_parallel=sequence)
    assert texts(on_mesh(params, mesh)) == plain_texts(kind)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose MTP layer has experts."""
    return save_with_mtp(tmp_path_factory.mktemp("glm"), "glm4_moe")


@pytest.mark.slow
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("devices", [2, 4])  # on four, KV heads are repeated
def test_devices_draft_with_the_mtp_layer_of_a_checkpoint(
    glm: Path, devices: int, shape: SpeculationConfig
):
    """Repeated on each, then split over them, its experts too."""
    expected = texts(load(glm, "none"))
    for split in (False, True):
        options: Any = {"mesh": make_mesh(devices), "shard_drafter": split}
        params = load(glm, "mtp", speculation=shape, **options)
        assert isinstance(params.drafter, EagleDrafter)
        assert isinstance(params.drafter.head.config.layers[0].mlp, ExpertsConfig)
        assert texts(params) == expected
