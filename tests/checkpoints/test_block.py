"""Block heads in their published layouts, read and written; errors for heads that do not fit."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec import LLM, SamplingParams, SpeculationConfig
from jaxspec.checkpoints import load as loading
from jaxspec.checkpoints import load_drafter as drafter_loading
from jaxspec.checkpoints.block import (
    check_block_copies,
    holds_block_head,
    load_block_head,
    save_block_head,
)
from jaxspec.checkpoints.safetensors_io import load_decoder, save_decoder
from jaxspec.config.model import ModelConfig
from jaxspec.decoding.draft_bytes import draft_weight_bytes
from jaxspec.decoding.drafters import BlockDrafter, MixedDrafter
from jaxspec.models.from_config.model import load_model_config, read_json
from jaxspec.models.heads import BlockHead, MarkovConfig
from jaxspec.models.mixers import Attention
from jaxspec.models.pipeline_cut import chosen_layers
from jaxspec.parallel import MODEL_AXIS, WHOLE, make_mesh
from jaxspec.parallel.bytes import local_bytes
from jaxspec.quantize.checkpoint import Checkpoint
from tests.helpers.block_checkpoints import MASK, RANK, published_head
from tests.helpers.block_heads import KINDS, arrays_equal
from tests.helpers.checkpoints import changed_copy, save_byte_tokenizer
from tests.helpers.random_models import random_target, tiny_config

FLOAT32 = jnp.dtype("float32")
CONFIDENCE = {"confidence_head.proj.weight", "confidence_head.proj.bias"}
COPIES = {"embed_tokens.weight", "lm_head.weight"}
CHAIN = SpeculationConfig.chain(5)  # the default one is deeper than the small blocks here


def model_in(directory: Path, vocab_size: int = 257) -> Path:
    save_decoder(random_target(tiny_config(vocab_size=vocab_size, hidden_size=64)), directory)
    return directory


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_in(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_dir: Path) -> ModelConfig:
    return load_model_config(target_dir)


@pytest.fixture(scope="module")
def heads(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: published_head(tmp_path_factory.mktemp(kind), target_dir, kind) for kind in KINDS}


def test_the_fields_and_tensors_of_published_heads(heads: dict[str, Path], target: ModelConfig):
    for kind, directory in heads.items():
        assert holds_block_head(directory)
        head = load_block_head(directory, target, FLOAT32)
        tensors = load_file(directory / "model.safetensors")
        dspark = kind == "dspark"
        assert (head.capture, head.block_size, head.mask_token) == ((0, 1), 6, MASK)
        assert (head.predicts_next, head.max_depth) == (dspark, 6 if dspark else 5)
        np.testing.assert_array_equal(head.fc.weight, tensors["fc.weight"].T)
        np.testing.assert_array_equal(head.hidden_norm, tensors["hidden_norm.weight"])
        mixer = head.layers[1].mixer
        assert isinstance(mixer, Attention) and mixer.config.qk_norm
        np.testing.assert_array_equal(mixer.q_norm, tensors["layers.1.self_attn.q_norm.weight"])
        queries = tensors["layers.1.self_attn.q_proj.weight"]
        np.testing.assert_array_equal(mixer.qkv.weight[:, 1, 1], queries[48:].T)
        assert (head.markov is not None) == dspark
        if head.markov is not None:
            after = tensors["markov_head.markov_w2.weight"]
            np.testing.assert_array_equal(head.markov.after, after)
        assert (head.confidence is not None) == dspark
        if head.confidence is not None:
            weight = tensors["confidence_head.proj.weight"]
            np.testing.assert_array_equal(head.confidence.weight, weight)
            np.testing.assert_array_equal(
                head.confidence.bias, tensors["confidence_head.proj.bias"]
            )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_written_in_its_layout_bit_for_bit(
    kind: str, dtype: str, heads: dict[str, Path], target_dir: Path, target: ModelConfig,
    tmp_path: Path,
):  # fmt: skip
    head = load_block_head(heads[kind], target, jnp.dtype(dtype))
    save_block_head(head, tmp_path, load_decoder(target_dir, target, jnp.dtype(dtype)))
    assert arrays_equal(load_block_head(tmp_path, target, jnp.dtype(dtype)), head)
    written, read = (
        load_file(directory / "model.safetensors") for directory in (tmp_path, heads[kind])
    )
    assert written.keys() == read.keys()
    for name in written.keys() - COPIES:
        assert np.array_equal(written[name], read[name].astype(written[name].dtype)), name
    if kind == "dspark":
        own = load_file(target_dir / "model.safetensors")
        table = own["model.embed_tokens.weight"].astype(written["fc.weight"].dtype)
        assert np.array_equal(written["embed_tokens.weight"], table)
    fields, before = (read_json(path / "config.json") for path in (tmp_path, heads[kind]))
    same = ("architectures", "block_size", "num_target_layers", "dflash_config", "markov_rank")
    for key in (*same, "enable_confidence_head", "confidence_head_with_markov"):
        assert fields.get(key) == before.get(key)


@pytest.mark.parametrize(("kind", "name", "rows"), [("gated", "gate", 1), ("rnn", "joint", 3)])
def test_markov_heads_of_other_kinds(
    kind: str, name: str, rows: int, heads: dict[str, Path], target_dir: Path, target: ModelConfig,
    tmp_path: Path,
):  # fmt: skip
    rng, columns = np.random.default_rng(3), 64 + RANK * (1 if kind == "gated" else 2)
    weight = rng.standard_normal((rows * RANK, columns)).astype(np.float32)
    tensors = {"weight": weight, "bias": weight[:, 0].copy()}
    named = {f"markov_head.{name}_proj.{part}": one for part, one in tensors.items()}
    given = changed_copy(heads["dspark"], tmp_path / "in", {"markov_head_type": kind}, **named)
    head = load_block_head(given, target, FLOAT32)
    assert head.markov is not None and head.markov.config == MarkovConfig(RANK, kind)  # pyright: ignore
    save_block_head(head, tmp_path / "out", load_decoder(target_dir, target, FLOAT32))
    assert arrays_equal(load_block_head(tmp_path / "out", target, FLOAT32), head)
    assert read_json(tmp_path / "out" / "config.json")["markov_head_type"] == kind
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(np.array_equal(written[key], one) for key, one in named.items())


def test_dflash_heads_of_deepspec_have_no_markov_head(
    heads: dict[str, Path], target_dir: Path, target: ModelConfig, tmp_path: Path
):
    without = dict.fromkeys((*CONFIDENCE, *(f"markov_head.markov_w{i}.weight" for i in (1, 2))))
    fields = {"markov_rank": 0, "markov_head_type": None, "enable_confidence_head": False}
    head = load_block_head(
        changed_copy(heads["dspark"], tmp_path / "in", fields, **without), target, FLOAT32
    )
    assert head.markov is None and head.predicts_next
    save_block_head(head, tmp_path / "out", load_decoder(target_dir, target, FLOAT32))
    assert arrays_equal(load_block_head(tmp_path / "out", target, FLOAT32), head)


def test_a_confidence_head_may_read_outputs_alone(
    heads: dict[str, Path], target_dir: Path, target: ModelConfig, tmp_path: Path
):
    weight = np.arange(64, dtype=np.float32)[None]
    given = changed_copy(
        heads["dspark"], tmp_path / "in", {"confidence_head_with_markov": False},
        **{"confidence_head.proj.weight": weight},
    )  # fmt: skip
    head = load_block_head(given, target, FLOAT32)
    assert head.confidence is not None
    outputs, bias = np.ones((2, 64), np.float32), float(head.confidence.bias[0])
    logits = head.confidence(jnp.asarray(outputs), head.markov, jnp.array([1, 2]))
    np.testing.assert_allclose(logits, [weight.sum() + bias] * 2, rtol=1e-6)
    save_block_head(head, tmp_path / "out", load_decoder(target_dir, target, FLOAT32))
    assert arrays_equal(load_block_head(tmp_path / "out", target, FLOAT32), head)


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_mesh(kind: str, heads: dict[str, Path], target: ModelConfig):
    mesh, whole = make_mesh(tensor_parallel=2), load_block_head(heads[kind], target, FLOAT32)
    copied = load_block_head(heads[kind], target, FLOAT32, mesh)
    assert copied.layout.heads == () and arrays_equal(copied.replace(layout=WHOLE), whole)
    split = load_block_head(heads[kind], target, FLOAT32, mesh, sharded=True)
    assert split.layout.heads == (MODEL_AXIS,)
    assert arrays_equal(split.replace(layout=WHOLE), whole)
    mixer = split.layers[0].mixer
    assert isinstance(mixer, Attention)
    assert mixer.qkv.weight.addressable_shards[0].data.shape[1] == 1


MISFITS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "another vocabulary": ("dflash", {"vocab_size": 300}, {}, "its vocab_size is 300, not 257"),
    "another hidden size": ("dflash", {"hidden_size": 32}, {}, "its hidden_size is 32, not 64"),
    "another target": ("dflash", {"num_target_layers": 36}, {}, "num_target_layers is 36, not 2"),
    "a layer that the target does not have": (
        "dspark", {"target_layer_ids": [0, 2]}, {},
        r"target_layer_ids must be increasing layers from -1 to 1, got \[0, 2\]",
    ),
    "values of another width": ("dflash", {"v_head_dim": 8}, {}, "v_head_dim 8 is not supported"),
    "layers out of order": (
        "dspark", {"target_layer_ids": [0, -1]}, {}, "target_layer_ids must be increasing",
    ),
    "no layers": ("dflash", {"dflash_config": {"mask_token_id": 3}}, {}, "got None"),
    "no options": ("dflash", {"dflash_config": None}, {}, "dflash_config must be an object"),
    "a mask that is no token": (
        "dspark", {"mask_token_id": 257}, {}, "mask_token_id 257 is no id of the target's 257",
    ),
    "no mask": ("dspark", {"mask_token_id": None}, {}, "mask_token_id None is no id"),
    "a block of nothing": ("dflash", {"block_size": 1}, {}, "must be an integer from 2, got 1"),
    "another kind of layers": (
        "dflash", {"model_type": "llama"}, {}, "model_type 'llama' is not supported for a block",
    ),
    "windows that are not in use": (
        "dflash", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9},
        {}, "layer_types has sliding_attention, but no sliding_window is in use",
    ),
    "a window of no size": (
        "dflash", {"dflash_config": {"use_swa": True}}, {},
        "swa_window_size must be a positive integer, got None",
    ),
    "a window that nothing uses": (
        "dflash", {"dflash_config": {"target_layer_ids": [0], "swa_window_size": 9}}, {},
        "swa_window_size is 9, and use_swa is not given: add it, true or false",
    ),
    "two windows": (
        "dflash", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9,
        "use_sliding_window": True, "dflash_config": {"use_swa": True, "swa_window_size": 5}}, {},
        "sliding_window is 9, and swa_window_size 5; remove the one that is wrong",
    ),
    "a later kind": (
        "dflash", {"architectures": ["DFlash9DraftModel"]}, {},
        r"architectures \['DFlash9DraftModel'\] is not a supported block drafter",
    ),
    "an option of a later kind": (
        "dflash", {"dflash_config": {"target_layer_ids": [0], "selector_rank": 8}}, {},
        "dflash_config: unknown key 'selector_rank'",
    ),
    "flags that disagree": (
        "dflash", {"is_causal": False, "dflash_config": {"causal": True}}, {},
        "is_causal = False and causal = True contradict each other",
    ),
    "another soft cap": (
        "dflash", {"final_logit_softcapping": 30.0}, {}, "softcapping is 30.0, not None",
    ),
    "another Markov head": (
        "dspark", {"markov_head_type": "fir"}, {}, "markov_head_type 'fir' is not supported",
    ),
    "a gate that is missing": (
        "dspark", {"markov_head_type": "gated"}, {}, "markov_head.gate_proj.weight is missing",
    ),
    "confidence that reads no Markov head": (
        "dspark", {"markov_rank": 0}, {}, "that reads the token before needs a Markov head",
    ),
    "no confidence weights": (
        "dspark", {}, {"confidence_head.proj.bias": None}, "confidence_head.proj.bias is missing",
    ),
    "confidence weights that are not announced": (
        "dspark", {"enable_confidence_head": False}, {}, "is not part of",
    ),
    "an unclear flag": (
        "dspark", {"enable_confidence_head": 1}, {}, "enable_confidence_head must be true or false",
    ),
    "an unknown key": ("dspark", {"new": 1}, {}, "unknown key 'new'"),
    "an unknown key of an option, beside others": (
        "dflash", {"block_size": 1, "hidden_size": 8, "num_target_layers": 9,
        "dflash_config": {"new": 1, "target_layer_ids": [0], "mask_token_id": 300}}, {},
        "dflash_config: unknown key 'new'.*hidden_size is 8, not 64; .*num_target_layers is 9, not "
        "2; block_size must be an integer from 2, got 1; mask_token_id 300 is no id",
    ),
    "a missing tensor": (
        "dflash", {}, {"layers.1.mlp.up_proj.weight": None}, "layers.1.mlp.up_proj.weight is miss",
    ),
    "a surplus tensor": (
        "dflash", {}, {"embed_tokens.weight": np.ones((257, 64), np.float32)}, "is not part of",
    ),
    "other features": (
        "dflash", {}, {"fc.weight": np.ones((64, 64), np.float32)},
        r"fc.weight is \[64, 64\], not \[64, 128\]",
    ),
    "another rank": (
        "dspark", {"markov_rank": 8}, {}, rf"markov_w1.weight is \[257, {RANK}\], not \[257, 8\]",
    ),
    "8-bit weights": (
        "dflash", {"quantization_config": {"quant_method": "fp8"}}, {}, "quantized block drafter",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_heads_that_do_not_fit(
    case: str, heads: dict[str, Path], target: ModelConfig, tmp_path: Path
):
    kind, config, tensors, message = MISFITS[case]
    directory = changed_copy(heads[kind], tmp_path, config, **tensors)
    assert holds_block_head(directory)
    with pytest.raises(ValueError, match=message) as caught:
        load_block_head(directory, target, FLOAT32)
    assert "\n" not in str(caught.value)


def test_a_target_whose_embeddings_are_scaled(heads: dict[str, Path], target: ModelConfig):
    scaled = target.map_layers(lambda layer: layer)
    object.__setattr__(scaled, "embed_scale", 8.0)
    with pytest.raises(ValueError, match="whose embeddings and logits are not scaled or capped"):
        load_block_head(heads["dspark"], scaled, FLOAT32)
    load_block_head(heads["dflash"], scaled, FLOAT32)  # z-lab's were trained with such ones


def test_what_is_refused_where_a_drafter_is_loaded(
    heads: dict[str, Path], target_dir: Path, tmp_path: Path
):
    assert not holds_block_head(target_dir)
    deep = SpeculationConfig.chain(6)
    with pytest.raises(ValueError, match=r"writes 5 tokens at once.*choose one of at most 5"):
        loading.load(target_dir, heads["dflash"], speculation=deep)
    wide = SpeculationConfig(num_nodes=300, max_depth=1, top_k=258)
    with pytest.raises(ValueError, match="top_k 258 is wider than the draft vocabulary of 257"):
        loading.load(target_dir, heads["dspark"], speculation=wide)
    with pytest.raises(ValueError, match="is a block drafter, which is not quantized"):
        Checkpoint(heads["dflash"])
    other = model_in(tmp_path, 320)
    with pytest.raises(ValueError, match=r"^block drafter's .*config.json: the block drafter does"):
        loading.load(other, heads["dflash"])


@pytest.mark.parametrize("name", sorted(COPIES))
def test_tables_that_are_not_the_targets_are_reported(
    name: str, heads: dict[str, Path], target_dir: Path, tmp_path: Path
):
    table = load_file(heads["dspark"] / "model.safetensors")[name]
    narrow = changed_copy(
        heads["dspark"], tmp_path / "narrow", {}, **{name: table.astype(jnp.bfloat16)}
    )
    check_block_copies(narrow, target_dir)  # rounded, as heads are saved
    other = table.copy()
    other[-1, -1] += 1
    head = changed_copy(heads["dspark"], tmp_path / "other", {}, **{name: other})
    with pytest.warns(UserWarning, match=f": {name} differs from .*, which is read in its place"):
        loading.load(target_dir, head, speculation=CHAIN)


def test_a_block_head_loads_into_the_last_stage_of_a_pipeline(
    heads: dict[str, Path], target_dir: Path
):
    mesh = make_mesh(pipeline_parallel=2)
    params = loading.load(target_dir, heads["dflash"], mesh=mesh, speculation=CHAIN)
    assert len(params.stages) == 1
    alone = load_block_head(heads["dflash"], load_model_config(target_dir), FLOAT32)
    assert isinstance(params.drafter, BlockDrafter)
    assert arrays_equal(params.drafter.head.replace(layout=WHOLE), alone)


def test_stages_are_split_by_what_the_drafter_reads(
    heads: dict[str, Path], target_dir: Path, monkeypatch
):
    """The target's LM head, too, though it is loaded only after the split is chosen."""
    counted = []

    def spied(*arguments: Any, drafter_has_devices: bool) -> tuple[int, ...]:
        counted.append(arguments[-1])
        return chosen_layers(*arguments, drafter_has_devices=drafter_has_devices)

    monkeypatch.setattr(loading, "chosen_layers", spied)
    mesh = make_mesh(pipeline_parallel=2)
    params = loading.load(target_dir, heads["dspark"], mesh=mesh, speculation=CHAIN)
    lm_head = params.target.embed if params.target.lm_head is None else params.target.lm_head
    steps = params.speculation.max_depth
    assert counted == [draft_weight_bytes(params.drafter, steps, local_bytes(lm_head))]


def texts(target_dir: Path, drafter: str | Path, **options: Any) -> list[list[int]]:
    save_byte_tokenizer(target_dir)
    llm = LLM(target_dir, drafter, max_length=64, page_size=8, **options)
    prompts = [[5, 17, 200, 3], list(range(40, 60))]
    sampling = [SamplingParams(0.8 * i, seed=i, max_tokens=16) for i in range(2)]
    return [one.token_ids for one in llm.generate(prompts, sampling)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"drafter_bits": 8}, {"drafter_bits": 4}, {"kv_dtype": "fp8"}],
    ids=["plain", "8 bits", "4 bits", "fp8 pages"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_drafts_the_text_of_plain_decoding(
    kind: str, options: dict[str, Any], heads: dict[str, Path], target_dir: Path
):
    cache = {key: value for key, value in options.items() if key == "kv_dtype"}
    plain = texts(target_dir, "none", **cache)
    for shape in (SpeculationConfig.chain(4), SpeculationConfig(12, 4, 3)):
        assert texts(target_dir, heads[kind], speculation=shape, **options) == plain


def test_lookup_may_be_mixed_with_a_block_head(heads: dict[str, Path], target_dir: Path):
    loaded = loading.load(target_dir, f"ngram+{heads['dspark']}", speculation=CHAIN)
    assert isinstance(loaded.drafter, MixedDrafter)
    assert isinstance(loaded.drafter.model, BlockDrafter)
    assert isinstance(loaded.drafter.model.head, BlockHead)
    assert loaded.drafter.may_skip


def test_on_a_gpu_the_model_of_a_mixture_drafts_in_every_round(
    heads: dict[str, Path], target_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(drafter_loading, "platform_of", lambda mesh: "gpu")
    loaded = loading.load(target_dir, f"ngram+{heads['dspark']}", speculation=CHAIN)
    assert isinstance(loaded.drafter, MixedDrafter) and not loaded.drafter.may_skip
