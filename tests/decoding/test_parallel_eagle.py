"""P-EAGLE heads: the published equations, and texts of plain decoding."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoints.eagle import load_eagle_head, save_eagle_head
from jaxspec.checkpoints.load import load
from jaxspec.checkpoints.safetensors_io import save_decoder
from jaxspec.config.engine import Preemption
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import ParallelEagleDrafter
from jaxspec.functional import EngineParams
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import Decoder
from jaxspec.models.from_config.eagle_head import eagle_head_config
from jaxspec.models.heads import DraftHead, HeadConfig, block_layers, head_shapes
from jaxspec.models.json.values import read_json
from tests.decoding.test_block_exactness import (
    REQUESTS,
    SAMPLINGS,
    engine_of,
    finished,
    plain_requests,
)
from tests.decoding.test_exactness import PROMPTS, TREES, Case, check
from tests.helpers.block_heads import MASK, arrays_equal, block_target
from tests.helpers.checkpoints import changed_copy
from tests.helpers.marks import slow
from tests.helpers.parallel_reference import parallel_logits
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import (
    admit_prompts,
    empty_state,
    generate,
    jit_decode,
    make_params,
    random_arrays,
    random_prompts,
    random_target,
    read_prompts,
    tiny_config,
)

TARGET = random_target(tiny_config(num_layers=3))
DEPTH = 4
FLOAT32 = jnp.dtype("float32")


def random_head(before_residual: bool) -> DraftHead:
    """Two layers, a reduced vocabulary."""
    layers = block_layers(TARGET.config, 2, 40).map_layers(
        lambda layer: dataclasses.replace(
            layer, mixer=dataclasses.replace(layer.attention, qk_norm=False)
        )
    )
    config = HeadConfig(
        layers, "eagle3", (0, 1, 3), 64, mask_token=MASK, norm_before_residual=before_residual
    )
    head = random_arrays(head_shapes(config, TARGET.config, FLOAT32), 5)
    ids = np.sort(np.random.default_rng(3).permutation(96)[:64]).astype(np.int32)
    return head.replace(token_ids=jnp.asarray(ids))


@functools.partial(jax.jit, compiler_options=FAST_COMPILE)
def jit_captured(target: Decoder, tokens: jax.Array) -> jax.Array | None:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    none = target.no_states()
    return decoder.run(target, tokens, positions, none, dense_causal_attend, (0, 1, 3))[2]


@pytest.mark.parametrize(
    ("before_residual", "page_size", "chunk", "rounds"),
    [(False, 7, 32, 0), slow(False, 7, 5, 4), slow(True, 16, 32, 4)],
)
def test_logits_are_those_of_the_published_equations(
    before_residual: bool, page_size: int, chunk: int, rounds: int, tmp_path: Path
):
    drafter = ParallelEagleDrafter(head=random_head(before_residual))
    speculation = SpeculationConfig.chain(DEPTH)
    params = EngineParams(target=TARGET, drafter=drafter, speculation=speculation)
    prompts = random_prompts((5, 21, 30))
    state = admit_prompts(params, empty_state(params, 3, 64, page_size), prompts)
    state = read_prompts(params, state, chunk, greedy=True)
    if rounds:
        state, emitted = jit_decode(params, state, rounds, max_rounds=4, shape=None, greedy=True)
        assert emitted.num_rounds == rounds

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def drafted(params: Any, state: Any) -> jax.Array:
        options = params.round_options()
        return params.drafter.logits(params.target, state, options)[0]

    save_eagle_head(drafter.head, tmp_path, TARGET.config)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.replace("midlayer.", "layers.0."): one for name, one in tensors.items()}
    config = read_json(tmp_path / "config.json")
    tokens, sizes = np.asarray(state.rows.tokens), np.asarray(state.rows.context_lens)
    captured, embed = np.asarray(jit_captured(TARGET, state.rows.tokens)), np.asarray(TARGET.embed)
    for row, ours in enumerate(drafted(params, state)):
        size = sizes[row]
        theirs = parallel_logits(
            tensors, config, embed, tokens[row, : size + 1], captured[row, :size], DEPTH
        )
        assert np.abs(theirs).max() > 1
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


CASES = [
    Case("peagle", tree, page_size, 3, temperature)
    for tree in ("chain5", "tree12")
    for page_size in (4, 16)
    for temperature in (0.0, 0.8)
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_text_is_that_of_plain_decoding(case: Case):
    check(case, make_params("peagle", TREES[case.tree]))


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_prefix_hits_and_preemption_do_not_change_the_text(preemption: Preemption):
    params = make_params("peagle", TREES["tree12"], block_target())
    engine = engine_of(params, num_pages=14, preemption=preemption)
    assert [one.token_ids for one in finished(engine)] == plain_requests()
    assert engine.scheduler.preemptions[preemption] > 0
    again = engine.add_all(REQUESTS[4:], SAMPLINGS[4:])
    engine.finish(again)
    assert [one.token_ids for one in again] == plain_requests()[4:]
    assert all(one.cached_tokens >= 8 for one in again)


@pytest.mark.slow
def test_an_adaptive_engine_does_not_change_the_text():
    params = make_params("peagle", TREES["chain5"], block_target())
    engine = engine_of(params, sealed=False, adaptive=True)
    assert [one.token_ids for one in finished(engine)] == plain_requests()


@pytest.mark.slow
def test_rejection_at_temperature_0_is_greedy():
    rules: tuple[Any, ...] = ("match", "rejection")
    shapes = [dataclasses.replace(TREES["chain5"], acceptance=rule) for rule in rules]
    matched, rejecting = (
        generate(make_params("peagle", shape), PROMPTS[:3])[0] for shape in shapes
    )
    assert rejecting == matched


def test_a_head_is_read_as_it_was_written(tmp_path: Path):
    head = random_head(False)
    save_eagle_head(head, tmp_path / "out", TARGET.config)
    again = load_eagle_head(tmp_path / "out", TARGET.config, FLOAT32)
    assert arrays_equal(again, head) and again.mask is not None and again.mask.token == MASK
    of_aws = {"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": MASK}
    of_aws |= {"mask_token_id": None}
    named = changed_copy(tmp_path / "out", tmp_path / "aws", of_aws)
    assert arrays_equal(load_eagle_head(named, TARGET.config, FLOAT32), head)
    save_decoder(TARGET, tmp_path / "model")
    loaded = load(tmp_path / "model", tmp_path / "out", speculation=SpeculationConfig.chain(DEPTH))
    assert isinstance(loaded.drafter, ParallelEagleDrafter)
    for fields, tensors, message in (
        ({"mask_token_id": None}, {}, "does not say which token stands for one that is not known"),
        ({"mask_token_id": 96}, {}, "mask_token_id 96 is no id of the target's 96 tokens"),
        ({"pard_token": 3}, {}, "mask_token_id = 95 and pard_token = 3 contradict each other"),
        ({"ptd_token_id": 96}, {}, "ptd_token_id 96 is no id of the target's 96 tokens"),
        ({}, {"mask_hidden": None}, "but there is no tensor mask_hidden"),
    ):
        wrong = changed_copy(tmp_path / "out", tmp_path / "wrong", fields, **tensors)
        with pytest.raises(ValueError) as caught:
            load_eagle_head(wrong, TARGET.config, FLOAT32)
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_of_the_speculators_library():
    """Its norm_before_residual is off by default, unlike that of its EAGLE-3 heads."""
    layer = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "vocab_size": 96,
        "max_position_embeddings": 1024,
    }
    raw = {
        "architectures": ["PEagleSpeculator"],
        "draft_vocab_size": 64,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
        "embed_requires_grad": True,
        "mask_token_id": MASK,
        "speculators_model_type": "peagle",
        "speculators_version": "0.9.0",
        "transformer_layer_config": layer,
    }
    config = eagle_head_config(raw, TARGET.config)
    assert (config.method, config.mask_token, config.model.num_layers) == ("eagle3", MASK, 2)
    assert (config.norm_before_residual, config.draft_vocab_size) == (False, 64)
    assert eagle_head_config(
        raw | {"norm_before_residual": True}, TARGET.config
    ).norm_before_residual
