"""Layers whose tokens attend to what an indexer chooses: what configs say of them, what is kept,
and where nothing is to choose. test_parity.py compares whole models with transformers."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import Geometry, ModelState, page_slots
from jaxspec.cache.layer_state import CommittedPath
from jaxspec.config.indexer import IndexerConfig
from jaxspec.config.mixers import LatentConfig
from jaxspec.config.model import ModelConfig
from jaxspec.models import decoder
from jaxspec.models.attention import PagedAttend
from jaxspec.models.decoder import Decoder, decoder_shapes
from jaxspec.models.forward import forward
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.heads import mtp_head_config
from jaxspec.models.pipeline_cut import check_layers
from jaxspec.parallel import WHOLE
from pallas_kernels.selection import NO_KERNELS
from tests.helpers.alias_checkpoints import raw_config
from tests.helpers.parity import load

TOP_K = 12


def raw(name: str, **changes: Any) -> dict[str, Any]:
    """A config that says nothing of its layers' indexers but what ``changes`` say; None: absent."""
    given = {key: v for key, v in raw_config(name).items() if key not in ("indexer_types",)}
    return {key: v for key, v in (given | changes).items() if v is not None}


def indexers(config: ModelConfig) -> list[IndexerConfig]:
    mixers = [layer.mixer for layer in config.layers]
    return [mixer.indexer for mixer in mixers if isinstance(mixer, LatentConfig) and mixer.indexer]


def full(config: ModelConfig) -> list[int]:
    return [index for index, indexer in enumerate(indexers(config)) if not indexer.shared]


MANY = {"num_hidden_layers": 12, "layer_types": None, "mlp_layer_types": None}


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, range(12)),
        ({"index_topk_freq": 4}, (0, 1, 5, 9)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, (0, 1, 2, 6, 10)),
        ({"index_topk_pattern": "FSSF" * 3}, (0, 3, 4, 7, 8, 11)),
        ({"indexer_types": ["full", "shared"] * 6}, range(0, 12, 2)),
        (
            {"indexer_types": ["full", "shared"] * 6}
            | {"index_topk_freq": 2, "index_skip_topk_offset": 1},
            range(0, 12, 2),
        ),
    ],
)
def test_layers_have_indexers_where_the_config_says_so(told: dict[str, Any], expected: Any):
    assert full(parse_model_config(raw("glm_moe_dsa", **MANY, **told))) == [*expected]


def test_pairs_that_are_rotated_are_those_of_the_family():
    told = {name: indexers(parse_model_config(raw(name)))[0] for name in
            ("deepseek_v32", "glm_moe_dsa")}  # fmt: skip
    v32, glm = told["deepseek_v32"], told["glm_moe_dsa"]
    assert v32 == IndexerConfig(TOP_K, num_heads=16, head_dim=16, interleaved=False)
    assert glm.interleaved
    other = parse_model_config(raw("deepseek_v32", indexer_rope_interleave=True))
    assert indexers(other)[0] == glm


def test_a_published_head_dim_of_another_part_is_no_matter():
    """GLM-5.2's is that of what does not rotate."""
    assert parse_model_config(raw("glm_moe_dsa", head_dim=16)) == parse_model_config(
        raw("glm_moe_dsa")
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_topk": 0}, "index_topk must be a positive integer, got 0"),
        ({"index_n_heads": "x"}, "index_n_heads must be a positive integer, got 'x'"),
        ({"index_head_dim": 6}, "index_head_dim (6) must be at least qk_rope_head_dim (8)"),
        ({"indexer_rope_interleave": 1}, "indexer_rope_interleave must be true or false, got 1"),
        ({"indexer_types": ["full", "half"]}, "indexer_types must be a list of full and shared"),
        ({"indexer_types": ["full"]}, "indexer_types has 1 entries for 2 layers"),
        ({"indexer_types": ["shared", "full"]}, "indexer_types: the first layer must be full"),
        ({"index_topk_pattern": 3}, "index_topk_pattern must be a list of full and shared, got 3"),
        ({"index_topk_freq": 0}, "index_topk_freq must be a positive integer, got 0"),
        ({"index_skip_topk_offset": "x"}, "index_skip_topk_offset must be an integer, got 'x'"),
        (
            {"indexer_types": ["full", "shared"], "index_topk_pattern": "FF"},
            "index_topk_pattern contradicts indexer_types: correct one of them, or remove",
        ),
        ({"layer_types": ["full_attention"] * 2}, "is not supported, only 'indexed_attention' in"),
        ({"num_experts": 4}, "num_experts = 4 contradicts n_routed_experts (= 8)"),
        ({"moe_router_dtype": "bfloat16"}, "moe_router_dtype = 'bfloat16' is not supported, only"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        parse_model_config(raw("glm_moe_dsa", **changes))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_without_a_latent_of_queries_there_is_no_indexer():
    with pytest.raises(ValueError, match="an indexer reads the queries' latent: q_lora_rank must"):
        parse_model_config(raw_config("glm_moe_dsa") | {"q_lora_rank": None})


SHARED = parse_model_config(raw_config("glm_moe_dsa-shared"))
SHAPES = decoder_shapes(SHARED, jnp.dtype(jnp.float32))


def test_only_layers_with_an_indexer_keep_its_keys():
    states = jax.eval_shape(lambda: SHAPES.init_state(Geometry(9, 4, 1))).layers
    assert [state.pages.shape for state in states] == [(9, 1, 4, 40)] * 4
    keys = [state.index_keys for state in states]
    assert [x is None for x in keys] == [False, True] * 2
    assert keys[0].shape == (9, 1, 4, 16)


def test_a_token_reads_all_keys_of_the_indexer_and_the_vectors_that_it_chose():
    full, shared = (layer.mixer for layer in SHARED.layers[:2])
    assert isinstance(full, LatentConfig) and isinstance(shared, LatentConfig)
    assert [full.entries_read(context) for context in (100, 10)] == [1600 + 480, 160 + 400]
    assert [shared.entries_read(context) for context in (100, 10)] == [480, 400]


def test_an_mtp_layer_has_an_indexer_though_the_last_layer_has_none():
    assert SHARED.mtp is not None and indexers(SHARED)[-1].shared
    [indexer] = indexers(mtp_head_config(SHARED, SHARED.mtp).model)
    assert not indexer.shared


def test_no_stage_begins_with_a_layer_that_shares():
    check_layers((2, 2), SHARED, 2)
    with pytest.raises(ValueError, match="layers 1,3: a stage begins with layer 1, which attends"):
        check_layers((1, 3), SHARED, 2)


def a_pass(columns: int, page_size: int = 4) -> str:
    """The program of three tokens over a table of so many columns."""

    def run(model: Decoder, states: Any, table: Any) -> Any:
        positions = jnp.arange(3)[None]
        attend = PagedAttend(
            rows=jnp.arange(1),
            page_table=table,
            context_lens=jnp.zeros(1, int),
            slots=page_slots(table, positions, jnp.ones((1, 3), bool), page_size),
            positions=positions,
            kv_lens=jnp.full(1, 3),
        )
        return decoder.run(model, positions, positions, states, attend)[:2]

    states = jax.eval_shape(lambda: SHAPES.init_state(Geometry(9, page_size, 1))).layers
    table = jax.ShapeDtypeStruct((1, columns), jnp.int32)
    return str(jax.make_jaxpr(run)(SHAPES, states, table))


@pytest.mark.parametrize(("columns", "chooses"), [(3, False), (4, True)])
def test_nothing_is_chosen_where_all_fit(columns: int, chooses: bool):
    """Then attention is that of other models, kernels included. Two of four layers choose, and all
    attend to what was chosen."""
    program = a_pass(columns)
    assert program.count("name=choose_slots") == 2 * chooses
    assert program.count("name=chosen_attention") == 4 * chooses


def test_keys_of_accepted_nodes_are_moved():
    shapes = jax.eval_shape(lambda: SHAPES.init_state(Geometry(3, 4, 1))).layers[:2]
    slots = np.arange(12, dtype=np.float32).reshape(3, 1, 4, 1)
    marked = jax.tree.map(lambda x: jnp.asarray(np.broadcast_to(slots, x.shape)), shapes)
    path = CommittedPath(
        rows=jnp.arange(1),
        page_table=jnp.array([[2, 1]]),
        context_lens=jnp.array([3]),
        path=jnp.array([[0, 2]]),
        counts=jnp.array([2]),
        is_chain=False,
    )
    moved = ModelState(layers=marked, layout=WHOLE).commit(path, NO_KERNELS)
    for one in moved.layers:  # node 2 of slot 5, at 5, goes to slot 4, at 4
        for pages in jax.tree.leaves(one):
            found = np.asarray(pages)[..., 0].ravel().tolist()
            assert found == [0, 1, 2, 3, 5, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.slow
def test_gradients_are_those_of_attention_to_the_chosen_positions(checkpoint):
    """The choice has none: weights of an indexer stay as they are."""
    directory, tokens, _ = checkpoint("glm_moe_dsa-shared")
    model = load(Path(directory))

    def loss(model: Decoder) -> Any:
        return jnp.square(forward(model, tokens[:1, :20])).mean()

    gradient = jax.jit(jax.grad(loss))(model)
    sizes = [float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient.layers[0].mixer)]
    assert np.isfinite(sizes).all() and max(sizes) > 0
    for leaf in jax.tree.leaves(gradient.layers[0].mixer.indexer):
        assert not np.any(leaf)
