"""8-bit caches: who has them, their scales, and what they cost in memory and in loss."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams, load
from jaxspec.cache import KVScales
from jaxspec.checkpoints.kv_scale_file import FORMAT, KVScaleFile
from jaxspec.checkpoints.load import with_kv_dtype
from jaxspec.checkpoints.safetensors_io import load_decoder, save_decoder
from jaxspec.commands import kv_scales
from jaxspec.commands.generate import make_parser
from jaxspec.commands.generate.prompt_file import Job
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.engine.engine import Engine
from jaxspec.engine.limits import engine_sizes
from jaxspec.engine.plans.host_copies import part_bytes
from jaxspec.evaluation.benchmarks.floors import floor_bytes
from jaxspec.models.quantized.kv_cache import (
    count_attentions,
    has_float8_cache,
    with_kv_scales,
    without_kv_scales,
)
from jaxspec.parallel import make_mesh
from jaxspec.quantize.kv_calibration import measured_scales, scores
from pallas_kernels.float8 import LARGEST
from tests.helpers.checkpoints import tiny_byte_llama
from tests.helpers.engines import CHAIN
from tests.helpers.float8_caches import with_float8
from tests.helpers.layouts import on_mesh
from tests.helpers.pool_bytes import pool_bytes
from tests.helpers.random_models import make_params, noisy, random_target

LENGTH = 64
CACHE = CacheConfig(page_size=8, max_length=LENGTH)
SAMPLING = SamplingParams(max_tokens=12)
PROMPT = list(range(1, 20))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_byte_llama(tmp_path_factory.mktemp("kv"))


def small_llm(model: Path, **options: Any) -> LLM:
    config = EngineConfig(max_rows=2, rounds_per_call=4, prefix_caching=False)
    return LLM(model, "none", max_length=LENGTH, page_size=8, engine=config, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_dtype": "fp9"}, "kv_dtype must be \"fp8\", or None for the model's dtype, got 'fp9'"),
        ({"kv_scales": "x.json"}, 'kv_scales is for caches of 8 bits: give kv_dtype="fp8", too'),
        ({"kv_dtype": "fp8", "kv_scales": "nowhere.json"}, "there is no file nowhere.json"),
    ],
    ids=["name", "alone", "missing"],
)
def test_bad_options_are_named(options: Any, message: str):
    with pytest.raises(ValueError, match=message):
        load(**options)


def test_every_layer_of_target_and_drafter_has_8_bit_pages():
    params = make_params("mixed", CHAIN)
    assert with_kv_dtype(params, None) is params
    made = with_kv_dtype(params, "fp8")
    assert has_float8_cache(made.target) and has_float8_cache(made.drafter)
    assert not has_float8_cache(params)
    ones = jax.tree.leaves(made)[: len(jax.tree.leaves(params))]
    assert len(jax.tree.leaves(made)) == len(jax.tree.leaves(params)) + 2 * 3 and ones
    assert not has_float8_cache(without_kv_scales(made))
    shapes = with_kv_dtype(jax.eval_shape(lambda: params), "fp8")
    assert has_float8_cache(shapes.target)


def test_a_cache_takes_a_byte_a_number():
    params = make_params("eagle3", CHAIN)
    made = with_kv_dtype(params, "fp8")
    of_pages = [
        pool_bytes(one, 100, 8, 4, together=False) - pool_bytes(one, 50, 8, 4, together=False)
        for one in (params, made)
    ]
    assert of_pages[0] == 4 * of_pages[1]  # of float32
    floors = [floor_bytes(one, 4, 100) for one in (params, made)]
    assert floors[0].target_kv == 4 * floors[1].target_kv > 0
    assert floors[0].draft_kv == 4 * floors[1].draft_kv > 0
    parts = [part_bytes(one, engine_sizes(one, CACHE, EngineConfig())) for one in (params, made)]
    assert 3 * parts[1] < parts[0]


@pytest.mark.slow
def test_other_weights_keep_the_scales_in_use():
    params = with_float8(make_params("ngram", CHAIN))
    other = noisy(random_target(), 0.1, seed=5)
    engine, expected = (
        Engine(own, CACHE, EngineConfig(max_rows=1, rounds_per_call=4))
        for own in (params, with_float8(params.replace(target=other)))
    )
    engine.use_target(other)
    texts = []
    for own in (engine, expected):
        own.finish([generation := own.add(PROMPT, SAMPLING)])
        texts.append(generation.token_ids)
    assert texts[0] == texts[1]
    assert has_float8_cache(engine.params.target)


def test_scales_are_split_and_repeated_as_kv_heads_are():
    params = make_params("none", CHAIN)
    scales = [KVScales(k=jnp.float32([1, 2]), v=jnp.float32([3, 4]))] * 2
    whole: Any = with_kv_scales(params.target, scales, None)
    assert whole.layers[0].mixer.kv_scales.k.tolist() == [1, 2]
    mesh = make_mesh(4)
    target: Any = with_kv_scales(on_mesh(params, mesh).target, scales, mesh)
    v = target.layers[1].mixer.kv_scales.v
    assert v.tolist() == [3, 3, 4, 4] and v.sharding.shard_shape(v.shape) == (1,)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ([[1.0, 2.0]], "1 scales for 2 layers"),
        ([[1.0], [1.0]], "k scales must be 2 finite numbers above 0"),
        ([[1.0, 2.0], [1.0, 0.0]], "k scales must be 2 finite numbers above 0"),
        ([[1.0, np.nan], [1.0, 2.0]], "k scales must be 2 finite numbers above 0"),
    ],
    ids=["layers", "heads", "zero", "nan"],
)
def test_scales_of_another_model_are_refused(scales: Any, message: str):
    own = [KVScales(k=jnp.float32(one), v=jnp.float32(one)) for one in scales]
    with pytest.raises(ValueError, match=message):
        with_kv_scales(random_target(), own, None)


def test_saved_weights_have_no_scales(tmp_path: Path):
    params = with_float8(make_params("none", CHAIN))
    save_decoder(params.target, tmp_path)
    found = load_decoder(tmp_path, params.target.config, jnp.dtype("float32"))
    assert not has_float8_cache(found) and count_attentions(found) == 2


# Files of scales.


@pytest.mark.slow
def test_scales_are_measured_written_and_used(model: Path, tmp_path: Path):
    prompts = [PROMPT, PROMPT[::-1]]
    llm = small_llm(model)
    wide = scores(llm, [PROMPT])
    scales = measured_scales(llm, prompts, margin=1.0)
    pages = np.asarray(llm.engine.programs.state.pool.target.layers[0].k)[1:]
    own = scales.target[0].k
    np.testing.assert_allclose(np.abs(pages).max(axis=(0, 2, 3)), own * LARGEST, rtol=1e-6)
    path = tmp_path / "scales.json"
    scales.write(path, model="x")
    narrow = small_llm(model, kv_dtype="fp8", kv_scales=path)
    loaded: Any = narrow.params.target.layers[0].mixer
    np.testing.assert_array_equal(loaded.kv_scales.k, own)
    found = scores(narrow, [PROMPT])
    assert not np.array_equal(found.nats, wide.nats)
    np.testing.assert_allclose(found.nats / found.tokens, wide.nats / wide.tokens, atol=0.1)
    with pytest.raises(ValueError, match="with kv_dtype None"):
        measured_scales(narrow, prompts)


ENTRY = {"k": [1.0, 2.0], "v": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"target": [ENTRY]}, f'its format must be "{FORMAT}"'),
        ([1], "must hold a JSON object"),
        ({"format": FORMAT, "target": "ab"}, "target must be a list of layers"),
        ({"format": FORMAT, "target": [{"k": [1]}]}, r"target\[0\].v must be a list of finite"),
        ({"format": FORMAT, "target": [ENTRY | {"k": ["a"]}]}, r"target\[0\].k must be"),
        ({"format": FORMAT, "target": [ENTRY | {"v": [0, 1]}]}, r"target\[0\].v must be"),
        ({"format": FORMAT, "target": [5]}, r"target\[0\].k must be"),
    ],
    ids=["format", "list", "layers", "missing", "text", "zero", "number"],
)
def test_bad_files_are_named(content: Any, message: str, tmp_path: Path):
    path = tmp_path / "scales.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        KVScaleFile.read(path)


def test_a_file_of_another_model_is_refused(tmp_path: Path):
    one = KVScales(k=jnp.float32([1, 2]), v=jnp.float32([1, 2]))
    path = tmp_path / "scales.json"
    KVScaleFile((one,) * 9).write(path)
    with pytest.raises(ValueError, match="kv_scales has 9 layers of the target, which has"):
        load(drafter="none", kv_dtype="fp8", kv_scales=path)


def test_a_file_of_prompts_records_the_cache(tmp_path: Path):
    path = tmp_path / "scales.json"
    path.write_text("{}")
    words = ["--kv-dtype", "fp8", "--kv-scales", str(path)]
    arguments = make_parser().parse_args(words)
    prompts: Any = type("Prompts", (), {"digest": "x"})
    record = Job(arguments, None, prompts, range(1)).record()
    assert record["kv_dtype"] == "fp8" and len(record["kv_scales_sha256"]) == 64


@pytest.mark.slow
def test_the_command_reports_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    library = Path(json.__file__).parent.parent
    data = [str(library / name) for name in ("asyncio", "email", "unittest", "http", "xml")]
    out = tmp_path / "scales.json"
    words = ["--data", *data, "--suffixes", ".py", "--rows", "8", "--tokens", "48", "--json"]
    assert kv_scales.main([*words, "--out", str(out)]) == 0
    wide, ones, measured = json.loads(capsys.readouterr().out)["results"]
    assert 1 < wide["perplexity"] < 40 and wide["loss_increase"] == 0
    for one in (ones, measured):
        assert abs(one["loss_increase"]) < 0.2 and one["tokens"] == wide["tokens"]
    assert KVScaleFile.read(out).drafter


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "1"], "--rows and --tokens must be at least 2"),
        (["--margin", "0.5"], "--margin must be at least 1"),
        (["--out", "no/where"], "no directory no"),
    ],
)
def test_bad_options_of_the_command_are_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert kv_scales.main(["--data", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err
