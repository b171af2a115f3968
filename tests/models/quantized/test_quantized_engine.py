"""Engines with quantized checkpoints: over devices, in stages, and with quantized drafters."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec import load
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import DraftModelDrafter, EagleDrafter
from jaxspec.engine.engine import Engine
from jaxspec.models.linear import Linear
from jaxspec.models.quantized.float8 import Float8Linear
from jaxspec.models.quantized.grouped import GroupedLinear
from jaxspec.parallel import make_mesh
from tests.helpers.checkpoints import tiny_eagle3_head, tiny_llama
from tests.helpers.marks import slow
from tests.helpers.model_kinds import FORMS
from tests.helpers.quantized_checkpoints import quantize_checkpoint

PROMPTS = [list(range(3, 40)), [7, 2, 9]]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
ROUNDED = ("compressed, rounded inputs", "compressed act-order, rounded inputs")
CHAIN = SpeculationConfig.chain(3)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("source"), **SIZES)


@pytest.fixture(scope="module")
def targets(source: Path, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("targets")
    names = ("awq", "gptq act-order", "float8 blocks", "float8 static", "mxfp8", "nvfp4", *ROUNDED)
    return {name: quantize_checkpoint(source, folder / name, FORMS[name])[0] for name in names}


def texts(model: Path, drafter: Any = "ngram", **options: Any) -> list[list[int]]:
    params = load(model, drafter, dtype="float32", speculation=CHAIN, **options)
    engine = Engine(params, CacheConfig(page_size=8, max_length=96), EngineConfig(max_rows=2))
    sampling = SamplingParams(max_tokens=24, stop_token_ids=())
    generations = engine.add_all(PROMPTS, [sampling] * 2)
    engine.finish(generations)
    assert not any(one.error for one in generations)
    return [one.token_ids for one in generations]


@pytest.mark.parametrize("name", ["awq", *map(slow, ("gptq act-order", "float8 static", "nvfp4"))])
@pytest.mark.parametrize(
    "mesh",
    [slow({"tensor_parallel": 2}), slow({"pipeline_parallel": 2}), slow({"sequence_parallel": 2})],
    ids=str,
)
def test_texts_over_devices_are_those_of_one(name: str, mesh: dict[str, Any], targets):
    assert texts(targets[name], mesh=make_mesh(**mesh)) == texts(targets[name], "none")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float8 blocks", "float8 static", "mxfp8", *ROUNDED])
def test_rounded_inputs_in_stages(name: str, targets):
    """Each product is on one device, so that the text is that of one."""
    model = targets[name]
    assert texts(model, mesh=make_mesh(pipeline_parallel=2)) == texts(model, "none")


def test_channels_over_a_grid_are_refused(source: Path, tmp_path: Path):
    model, _ = quantize_checkpoint(source, tmp_path, FORMS["gptq 8 bits, channels"])
    with pytest.raises(ValueError, match="it cannot be split over a grid of devices"):
        load(model, mesh=make_mesh((2, 2)))


@pytest.mark.parametrize("name", ["gptq", "float8"])
def test_drafters_come_from_quantized_checkpoints(name: str, source: Path, tmp_path: Path):
    def quantizes(tensor: str) -> bool:
        return tensor.endswith("proj.weight") or tensor in ("fc.weight", "lm_head.weight")

    kind = Float8Linear if name == "float8" else GroupedLinear
    of_head = Linear if name == "float8" else GroupedLinear  # a CPU widens it once
    head_dir = tiny_eagle3_head(tmp_path / "head", source)
    head, _ = quantize_checkpoint(head_dir, tmp_path / "quantized", FORMS[name], quantizes)
    drafter = load(source, head, speculation=CHAIN).drafter
    assert isinstance(drafter, EagleDrafter)
    assert isinstance(drafter.head.front.fc, of_head)
    assert isinstance(drafter.head.lm_head, of_head)
    draft, dense = quantize_checkpoint(source, tmp_path / "draft", FORMS[name])
    model = load(source, draft, speculation=CHAIN).drafter
    assert isinstance(model, DraftModelDrafter)
    mixer: Any = model.model.layers[0].mixer
    assert isinstance(mixer.o, kind)
    np.testing.assert_array_equal(
        model.model.embed, load(dense, "none", speculation=CHAIN).target.embed
    )
