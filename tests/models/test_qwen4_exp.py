"""Qwen3.8-Flash-Next: what its configs say, and what is refused; its blocks beside transformers';
trees against whole texts. test_parity.py compares the model's logits with transformers', and
tests/kernels/test_span_means.py attention with its definition."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp import modeling_qwen4_exp as theirs

from jaxspec.cache import Geometry
from jaxspec.checkpoints.safetensors_io import save_tree
from jaxspec.checkpoints.stored_ngrams import check_stored_ngrams, ngram_numbers
from jaxspec.config.experts import ExpertsConfig
from jaxspec.config.indexer import MeanIndexerConfig
from jaxspec.config.layer import LayerConfig
from jaxspec.config.mixers import IndexedAttentionConfig
from jaxspec.config.ngrams import NgramConfig
from jaxspec.config.recurrent import GatedDeltaConfig
from jaxspec.config.rope import RopeConfig
from jaxspec.config.streams import GatedStreamsConfig
from jaxspec.models.decoder import decoder_shapes
from jaxspec.models.forward_pass import make_pass
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.gated_streams import gated_connection_shape, gated_fold_shape
from jaxspec.models.linear import Computed
from jaxspec.models.ngram_ids import rows_of_ngrams
from jaxspec.models.tensors import joining, splitting
from jaxspec.parallel import WHOLE
from pallas_kernels.selection import NO_KERNELS
from tests.helpers.alias_checkpoints import random_alias, raw_config
from tests.helpers.checkpoints import save_tensors
from tests.helpers.families import save_family
from tests.helpers.marks import LEFT_OUT
from tests.helpers.parity import load
from tests.helpers.qwen4_exp_checkpoints import FULL, LINEAR
from tests.helpers.sampling_reference import plain_logits
from tests.helpers.tree_logits import LONGEST, assert_nodes_have_logits_of_texts

CONFIG = Path(__file__).parent / "configs/qwen3.8-flash-next.json"
END = 248044
# As the published GGUF files have them.
MULTIPLIERS = (23_703_573_157_769, 20_109_073_645_365, 8_052_911_324_071)


def published() -> dict[str, Any]:
    return json.loads(CONFIG.read_text())


def changed(**text: Any) -> dict[str, Any]:
    raw = published()
    raw["text_config"] |= text
    return raw


def ngrams_of(raw: dict[str, Any]) -> list[NgramConfig | None]:
    return [layer.ngrams for layer in parse_model_config(raw).layers]


def test_layers_are_as_the_published_config_says():
    model = parse_model_config(published())
    first, second, _, fourth, *_ = model.layers
    assert first.mixer == GatedDeltaConfig(16, 48, 128, 128, gate="sigmoid")
    attention = fourth.mixer
    assert isinstance(attention, IndexedAttentionConfig)
    assert attention.indexer == MeanIndexerConfig(2048, 4, 128, span=4)
    assert attention.attention.rope == RopeConfig(256, 1e7, rotary_dim=64)
    assert attention.index_rope == RopeConfig(128, 1e7, rotary_dim=64)
    assert attention.attention.gate == "entries" and attention.attention.qk_norm
    assert {layer.streams for layer in model.layers} == {GatedStreamsConfig(4, 320)}
    assert {layer.norms for layer in model.layers} == {"none"} and not model.has_norm
    assert isinstance(first.mlp, ExpertsConfig) and first.mlp.shared_gate
    assert (first.mlp.intermediate_size, first.mlp.shared_size) == (640, 640)
    ngrams = second.ngrams
    assert ngrams is not None and [*ngrams_of(published())].count(None) == 47
    assert (ngrams.end, ngrams.width, ngrams.taps, ngrams.parts) == (END, 160, 4, 128)
    assert ngrams.multipliers == MULTIPLIERS and ngrams.past == 9
    assert (len(ngrams.sizes), ngrams.rows) == (16, 320_001_536)


def test_hashes_are_those_of_transformers():
    """Of the second layer that has some, too."""
    sizes = {"vocab_size": 1000, "ngram_size": 4, "heads_per_ngram": 3, "seed": 7}
    sizes |= {"ngram_vocab_size_base": 90, "ple_embed_dim": 36, "ple_layer_ids": [2, 5]}
    raw = changed(**sizes, eos_token_id=[5, 3], make_ngram_vocab_size_divisible_by=64)
    found = [ngrams for ngrams in ngrams_of(raw) if ngrams is not None]
    text = Qwen4ExpTextConfig(**raw["text_config"])
    for index, ngrams in enumerate(found):
        embedding = theirs.Qwen4ExpTextNGramEmbedding(text, 36, 0, index)
        wanted = theirs._build_layer_multipliers(1000, 4, index, 7)
        assert ngrams.multipliers == tuple(wanted.tolist())
        assert ngrams.sizes == tuple(embedding.head_vocab_sizes) and ngrams.end == 5
        assert ngrams.rows == embedding.ngram_embedding.num_embeddings


def rows_in_words(tokens: list[int], ngrams: NgramConfig) -> Iterator[int]:
    """The rows of the last token of a text, by integers of any size."""
    ended, seen, start = False, list[int](), 0
    for place in range(ngrams.tokens):
        token = tokens[-1 - place] if place < len(tokens) else ngrams.end
        ended = ended or (place > 0 and token == ngrams.end)
        seen.append(ngrams.end if ended else token)
    mixed = seen[0] * ngrams.multipliers[0]
    for place in range(1, ngrams.tokens):
        mixed ^= seen[place] * ngrams.multipliers[place]
        for size in ngrams.sizes[(place - 1) * ngrams.heads :][: ngrams.heads]:
            yield start + mixed % size
            start += size


@pytest.mark.parametrize("layer", [{}, {"ngram_vocab_size_base": 40}, {"ngram_size": 5}], ids=str)
def test_rows_are_remainders_of_hashes(layer: dict[str, Any]):
    ngrams = ngrams_of(changed(**layer))[1]
    assert ngrams is not None
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 248320, 60)
    tokens[[3, 4, 20, 22, 59]], tokens[[10, 40]] = END, 248319
    before = [0] * (ngrams.tokens - 1) + [int(token) + 1 for token in tokens]
    windows = np.lib.stride_tricks.sliding_window_view(np.array(before, np.int32), ngrams.tokens)
    found = rows_of_ngrams(jnp.asarray(windows)[None], ngrams)[0]
    wanted = [[*rows_in_words(tokens[: i + 1].tolist(), ngrams)] for i in range(len(tokens))]
    np.testing.assert_array_equal(found, wanted)


def test_streams_are_read_and_written_as_transformers_does():
    count, hidden, rank = 3, 8, 5
    torch.manual_seed(0)
    config = Qwen4ExpTextConfig(hidden_size=hidden, hc_count=count, hc_lowrank=rank)
    module, last = (theirs.Qwen4ExpTextGatedResidual(config, both) for both in (True, False))
    x, y = torch.randn(2, 5, count * hidden), torch.randn(2, 5, hidden)
    with torch.no_grad():
        for parameter in (*module.parameters(), *last.parameters()):
            parameter.copy_(0.5 * torch.randn_like(parameter))
        read, kept, written = module(x)
        after = kept + (y[:, :, None] * written[..., None]).flatten(-2)
        folded = last(x)
    streams, dtype = GatedStreamsConfig(count, rank), jnp.dtype(jnp.float32)
    tensors = {f"a.mlp_hyper_connection.{name}": x for name, x in module.state_dict().items()}
    tensors |= {f"a.hyper_connection_mixer.{name}": x for name, x in last.state_dict().items()}
    own = joining({name: jnp.asarray(x.numpy()) for name, x in tensors.items()}).with_norms(1)
    step = make_pass([], jnp.zeros((2, 5), int), lambda *_: (None, None), 1e-6, WHOLE, NO_KERNELS)
    whole = jnp.asarray(x.numpy()).reshape(2, 5, count, hidden)
    connection = gated_connection_shape(streams, hidden, dtype).mapped("a.", "ffn", own)
    additions, found = connection.read(whole, None, step)
    np.testing.assert_allclose(found, read, atol=2e-6)
    result = additions.after(Computed(jnp.asarray(y.numpy())), step)
    np.testing.assert_allclose(result.reshape(after.shape), after, atol=2e-6)
    fold = gated_fold_shape(streams, hidden, dtype).mapped("a.", own)
    np.testing.assert_allclose(fold(whole, step), folded, atol=2e-6)


def test_what_is_kept_of_rows_and_tokens():
    shapes = decoder_shapes(parse_model_config(published()), jnp.dtype(jnp.bfloat16))
    states = jax.eval_shape(lambda: shapes.init_state(Geometry(9, 16, 3))).layers
    of_ngrams, attention = states[1].second, states[3]
    assert (of_ngrams.tokens.shape, of_ngrams.inputs.shape) == ((3, 2), (3, 9, 4, 2560))
    assert attention.k.shape == (9, 2, 16, 256) and attention.index_keys.shape == (9, 1, 16, 128)
    ngrams = shapes.layers[1].ngrams
    assert ngrams is not None and ngrams.table.dtype == jnp.bfloat16
    assert ngrams.table.shape == (320_001_536, 160) and ngrams.scale is None
    config = parse_model_config(changed(ple_embedding_dtype="float8_e4m3fn"))
    ngrams = decoder_shapes(config, jnp.dtype(jnp.bfloat16)).layers[1].ngrams
    assert ngrams is not None and ngrams.table.dtype == jnp.float8_e4m3fn
    assert ngrams.scale is not None and ngrams.scale.shape == (1,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["rnn"] * 48}, "layer_types: 'rnn' is not supported"),
        ({"layer_types": [LINEAR]}, "layer_types must be a list of 48 kinds, got"),
        ({"ple_layer_ids": [4]}, f"ple_layer_ids: layer 4 must be one of {LINEAR}"),
        ({"ple_layer_ids": [0]}, "ple_layer_ids must be from 1 to 48, got [0]"),
        ({"ple_layer_ids": 2}, "ple_layer_ids must be a list of integers, got 2"),
        ({"ple_embed_dim": 2561}, "ple_embed_dim (2561) must be a multiple of the heads of all"),
        ({"ple_conv_kernel_size": 1}, "ple_conv_kernel_size must be 2 or more, got 1"),
        ({"ngram_size": 1}, "must be a multiple of the heads of all n-grams (0)"),
        ({"ngram_vocab_size_base": 2**30}, "rows is too long, it must have fewer than 2147483648"),
        ({"seed": None}, "seed must be an integer, got None"),
        ({"eos_token_id": None}, "eos_token_id must name a token that ends n-grams, got None"),
        ({"hc_count": 1}, "hc_count must be 2 or more, got 1"),
        ({"hc_lowrank": 0}, "hc_lowrank must be a positive integer, got 0"),
        ({"indexer_n_heads": None}, "indexer_n_heads must be a positive integer, got None"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads = 2 is not supported, only 1"),
        ({"indexer_budget": 2047}, "(2047) must be a multiple of indexer_compress_ratio (4)"),
        ({"indexer_head_dim": 32}, "indexer_head_dim (32) must be at least 64, the entries of a"),
        ({"ple_embedding_dtype": "nvfp4"}, "must be bfloat16 or float8_e4m3fn, got 'nvfp4'"),
        ({"output_gate_type": "tanh"}, "output_gate_type must be silu or sigmoid, got 'tanh'"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        parse_model_config(changed(**change))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_where_texts_end_must_be_told_once():
    """The text model hashes with its own token."""
    whole = parse_model_config(published())
    assert parse_model_config(published() | {"eos_token_id": END}) == whole
    with pytest.raises(ValueError, match="eos_token_id = 248044 contradicts that beside text_co"):
        parse_model_config(published() | {"eos_token_id": 1})


def test_layers_of_streams_with_gates_have_nothing_besides():
    first, second, _, fourth, *_ = parse_model_config(published()).layers
    with pytest.raises(ValueError, match="have norms before their blocks"):
        dataclasses.replace(first, norms="before")
    with pytest.raises(ValueError, match="a layer without norms reads residual streams"):
        LayerConfig(first.mixer, first.mlp, "none")
    with pytest.raises(ValueError, match="n-grams are of recurrent layers"):
        dataclasses.replace(fourth, ngrams=second.ngrams)


@dataclasses.dataclass
class Stored:
    """A tensor of a file."""

    name: str
    values: tuple[int, ...]
    file: Path = Path("model.safetensors")
    dtype: str = "I64"

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.values),)

    def read(self, *index: slice) -> np.ndarray:
        return np.array(self.values)[index or ...]


def test_files_with_other_hashes_are_named():
    config = parse_model_config(published())
    stored = {name: Stored(name, values) for name, values in ngram_numbers(config).items()}
    module = "model.layers.1.ple.ple_embedding"
    kinds = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
    assert stored.keys() == {f"{module}.{kind}" for kind in kinds}
    assert stored[f"{module}.layer_multipliers"].values == MULTIPLIERS
    check_stored_ngrams(config, stored)
    for name, tensor in stored.items():
        other = dataclasses.replace(tensor, values=tuple(x + 2 for x in tensor.values))
        with pytest.raises(ValueError, match=rf"{re.escape(name)} has other numbers than follow"):
            check_stored_ngrams(config, stored | {name: other})


@pytest.mark.slow
@pytest.mark.filterwarnings(LEFT_OUT)
def test_files_with_published_names_are_read(tmp_path: Path):
    """The text model is inside of one of text and images, and has experts in one tensor."""
    directory = save_family(tmp_path / "alone", "qwen4_exp")
    tensors, stored = load_file(directory / "model.safetensors"), dict[str, Any]()
    experts = re.compile(r"(.*\.experts)\.0\.gate_proj\.weight")
    for name, x in tensors.items():
        outer = re.sub(r"^model\.", "model.language_model.", name)
        if (match := experts.fullmatch(name)) is not None:
            parts = [
                [tensors[f"{match[1]}.{i}.{kind}_proj.weight"] for i in range(8)]
                for kind in ("gate", "up", "down")
            ]
            gate, up, down = map(np.stack, parts)
            module = re.sub(r"^model\.", "model.language_model.", match[1])
            stored[f"{module}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
            stored[f"{module}.down_proj"] = down
        elif ".experts." not in name:
            stored[outer] = x
    stored["model.visual.pos_embed.weight"] = np.ones((16, 32), np.float32)
    text = json.loads((directory / "config.json").read_text())
    text.pop("architectures")
    raw = published() | {"text_config": text}
    save_tensors(tmp_path / "inside", stored, raw)
    found, expected = load(tmp_path / "inside"), load(directory)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen4_exp", "qwen4_exp_text"])
def test_what_is_written_is_what_was_read(tmp_path: Path, family: str):
    """By splits, and joined on a device."""
    model = random_alias(family)
    save_tree(tmp_path, model, model.mapped(splitting()), raw_config(family))
    tensors = load_file(tmp_path / "model.safetensors")
    table = "model.layers.{}.ple.ple_embedding.ngram_embedding.shard_{}.weight"
    first, parts = (1, 4) if family == "qwen4_exp" else (0, 3)
    assert table.format(first, parts - 1) in tensors
    assert table.format(first, parts) not in tensors
    joined = decoder_shapes(model.config, jnp.dtype(jnp.float32)).mapped(
        joining({name: jnp.asarray(x) for name, x in tensors.items()})
    )
    for other in (load(tmp_path), joined):  # of norms 1 is subtracted, and added again
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-7), other, model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "before"),
    [
        *(("qwen4_exp", before) for before in (1, 2, 3, 10, 14, 18)),
        *(("qwen4_exp_text", before) for before in (1, 3, 15)),
    ],
)
def test_nodes_of_a_tree_have_the_logits_of_their_texts(family: str, before: int):
    """And so have tokens that follow an accepted path. One of seven tokens ends a text."""
    assert_nodes_have_logits_of_texts(random_alias(family), before, ids=(36, 43))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["indexer", "n-grams", "ends"])
def test_each_part_matters(part: str):
    """Else the other tests would test little."""
    model = random_alias("qwen4_exp")
    tokens = np.random.default_rng(0).integers(36, 43, (1, LONGEST))

    def without(layer: Any) -> Any:
        match part:
            case "indexer" if layer.mixer.config.heads.endswith("an indexer chooses"):
                return layer.replace(mixer=layer.mixer.attention)
            case "n-grams":
                return layer.replace(ngrams=None)
            case "ends" if layer.ngrams is not None:
                config = dataclasses.replace(layer.ngrams.config, end=95)
                return layer.replace(ngrams=layer.ngrams.replace(config=config))
        return layer

    other = model.replace(layers=tuple(map(without, model.layers)))
    found, expected = (np.asarray(plain_logits(each, tokens)) for each in (other, model))
    assert np.abs(found - expected).max() > 0.01


def test_kinds_of_layers_have_two_names():
    kinds = published()["text_config"]["layer_types"]
    other = [kind.replace(FULL, "indexed_attention") for kind in kinds]
    whole = parse_model_config(published())
    assert parse_model_config(changed(layer_types=other)) == whole
    assert parse_model_config(changed(layer_types=None)) == whole
