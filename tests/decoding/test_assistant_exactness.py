"""Gemma 4's assistants draft from the target's cache, and change no text. On one device, with
prompts that begin alike and requests that lose their pages, it is test_families_under_load.py; here
are meshes, checkpoints, and a quick guard of both."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxspec.checkpoints.load import load
from jaxspec.checkpoints.safetensors_io import save_tree
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import AssistantDrafter, MixedDrafter
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.tensors import splitting
from jaxspec.parallel import make_mesh
from tests.decoding.test_acceptance import P_VALUE
from tests.decoding.test_block_distribution import SPECS, drawn_by, p_value
from tests.decoding.test_family_exactness import plain, run, target
from tests.helpers import alias_checkpoints
from tests.helpers.random_assistants import assistant_keys, random_assistant, save_assistant
from tests.helpers.random_models import generate, random_prompts, random_target
from tests.helpers.sampling_reference import reference_texts

TREE = SpeculationConfig(num_nodes=8, max_depth=3, top_k=2)


def saved(directory: Path, family: str, *, ordered: bool) -> tuple[Path, Path]:
    """Checkpoints of a target and its assistant."""
    model, raw = target(family), alias_checkpoints.raw_config(family)
    save_tree(directory / "target", model, model.mapped(splitting()), raw)
    assistant = random_assistant(model, ordered=ordered)
    keys = assistant_keys(model, ordered=ordered)
    return directory / "target", save_assistant(directory / "assistant", assistant, keys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "ordered", "options"),
    [
        ("gemma4", False, {}),
        ("gemma4", False, {"mesh": {"tensor_parallel": 2}}),
        ("gemma4", False, {"mesh": {"tensor_parallel": 4}}),  # KV heads are repeated
        ("gemma4", False, {"mesh": {"sequence_parallel": 2}}),
        ("gemma4-experts", False, {}),
        ("gemma4-experts", True, {"mesh": {"tensor_parallel": 2}}),
        ("gemma4-small", True, {"mesh": {"tensor_parallel": 2}}),
        ("gemma4-small", True, {"mesh": {"tensor_parallel": (2, 2)}}),
        ("gemma4-small", True, {"drafter_bits": 4}),
        ("gemma4-small", True, {"drafter_bits": 8}),
    ],
)
def test_a_checkpoint_has_the_text_of_plain_decoding(
    family: str, ordered: bool, options: dict[str, Any], tmp_path: Path
):
    model, assistant = saved(tmp_path, family, ordered=ordered)
    given: Any = options | ({"mesh": make_mesh(**options["mesh"])} if "mesh" in options else {})
    params = load(model, assistant, speculation=TREE, **given)
    assert isinstance(params.drafter, AssistantDrafter)
    assert run(params) == plain(family)


@pytest.mark.slow
def test_lookup_goes_before_an_assistant(tmp_path: Path):
    model, assistant = saved(tmp_path, "gemma4", ordered=False)
    params = load(model, f"ngram+{assistant}", speculation=TREE)
    assert isinstance(params.drafter, MixedDrafter)
    assert run(params) == plain("gemma4")


@pytest.mark.slow
def test_caches_of_eight_bits(tmp_path: Path):
    model, assistant = saved(tmp_path, "gemma4-small", ordered=False)
    texts = [
        run(load(model, drafter, speculation=TREE, kv_dtype="fp8"))
        for drafter in ("none", assistant)
    ]
    assert texts[0] == texts[1]


def test_a_pipeline_is_refused(tmp_path: Path):
    model, assistant = saved(tmp_path, "gemma4", ordered=False)
    with pytest.raises(ValueError, match="an assistant reads layers of all stages of a pipeline"):
        run(load(model, assistant, speculation=TREE, mesh=make_mesh(pipeline_parallel=2)))


@functools.cache
def small_target() -> Decoder:
    """The least that has every part: a layer of each kind with keys, and one that reads them."""
    raw = alias_checkpoints.raw_config("gemma4-small") | {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
        "per_layer_config": {"1": {"head_dim": 32}, "2": {"head_dim": 32}},
    }
    return random_target(parse_model_config(raw))


def test_chains_have_the_text_of_plain_decoding():
    """The guard of the slow tests above and in test_families_under_load.py."""
    model, prompts = small_target(), random_prompts((9,))
    drafter = AssistantDrafter(assistant=random_assistant(model, ordered=True))
    params = EngineParams(target=model, drafter=drafter, speculation=SpeculationConfig.chain(2))
    found, state = generate(params, prompts, page_size=5, max_lens=[33])
    assert state.rows.stats.accepted[:, 1].sum() > 2, "hardly a draft was accepted"
    greedy = [SamplingParams(max_tokens=24)]
    assert found == reference_texts(model, prompts, greedy, 33, found)
    assert jnp.isfinite(state.rows.draft.hidden).all()


@pytest.mark.slow
@pytest.mark.parametrize("shape", SPECS)
@pytest.mark.parametrize("ordered", [True, False])
def test_texts_under_rejection_have_the_targets_distribution(ordered: bool, shape: str):
    """Of an ordered head tokens of other groups have no probability."""
    model = small_target()
    [prompt] = random_prompts((9,))
    drafter = AssistantDrafter(assistant=random_assistant(model, ordered=ordered))
    spec = dataclasses.replace(SPECS[shape], acceptance="rejection")
    params = EngineParams(target=model, drafter=drafter, speculation=spec)
    cold = 0.1  # its logits lie close together
    found, depth = drawn_by(params, prompt, cold)
    assert 0.2 < depth < 2.5, "drafts must be accepted and refused"
    assert p_value(found, prompt, cold, small_target) > P_VALUE
    assert p_value(found, prompt, 1.5 * cold, small_target) < 1e-9, "others are noticed"
