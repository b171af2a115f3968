"""The built-in model and its head: logits as transformers', and the same text however drafted."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import BUILT_IN_HEAD, BUILT_IN_MODEL, LLM, SamplingParams, SpeculationConfig
from jaxspec.checkpoints.eagle import load_eagle_head
from jaxspec.checkpoints.load import load
from jaxspec.checkpoints.load_drafter import MIXED, DraftedModel, choose_drafter, load_drafter
from jaxspec.commands import generate
from jaxspec.commands.shared.engine_config import speculation_config
from jaxspec.config.speculation import default_speculation
from jaxspec.decoding.drafters import EagleDrafter, MixedDrafter, NGramDrafter
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.linear import Linear
from jaxspec.models.nodes import nodes_of
from jaxspec.models.quantized.float8 import Float8Linear
from jaxspec.parallel import make_mesh
from tests.helpers.checkpoints import hf_logits, tiny_llama
from tests.helpers.marks import slow
from tests.helpers.sampling_reference import plain_logits

PROMPTS = [
    "import json\n\n\ndef read_config(path):\n",
    "class Stack:\n",
    "def mean(values):\n    return",
]
SAMPLING = [
    SamplingParams(max_tokens=256, stop_token_ids=()),
    SamplingParams(max_tokens=256, stop_token_ids=(), temperature=0.8, top_p=0.9, seed=1),
    SamplingParams(max_tokens=256, stop_token_ids=(), temperature=0.8, top_p=0.9, seed=2),
]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(drafter="none", dtype="float32", max_length=512)


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[list[int]]:
    return [completion.token_ids for completion in plain.generate(PROMPTS, SAMPLING)]


def test_logits_are_those_of_transformers(plain: LLM):
    tokens = np.asarray(plain.tokenizer(PROMPTS[0] * 8)["input_ids"], np.int32)[None]
    reference = hf_logits(BUILT_IN_MODEL, tokens.astype(np.int64))
    difference = np.abs(np.asarray(plain_logits(plain.params.target, tokens)) - reference).max()
    assert difference <= 1e-4 * np.abs(reference).max()


@pytest.mark.parametrize(
    ("drafter", "speculation", "greedy_length"),
    [
        slow("ngram", SpeculationConfig.chain(5), 1.5),
        slow("ngram", SpeculationConfig(num_nodes=60, max_depth=8, top_k=8), 1.5),
        slow(BUILT_IN_MODEL, SpeculationConfig(num_nodes=16, max_depth=4, top_k=3), 4.0),
        slow(BUILT_IN_HEAD, SpeculationConfig.chain(5), 3.0),
        slow("auto", SpeculationConfig.chain(5), 3.0),
        slow(BUILT_IN_HEAD, SpeculationConfig(num_nodes=60, max_depth=8, top_k=8), 4.0),
    ],
    ids=["ngram-chain", "ngram-tree", "itself-tree", "head-chain", "mixed-chain", "head-tree"],
)
def test_text_does_not_depend_on_the_drafter(expected, drafter, speculation, greedy_length):
    llm = LLM(drafter=drafter, dtype="float32", max_length=512, speculation=speculation)
    completions = llm.generate(PROMPTS, SAMPLING)
    assert [c.token_ids for c in completions] == expected
    assert completions[0].acceptance_length > greedy_length


@pytest.mark.slow
def test_lookup_and_the_head_draft_by_default_and_well():
    llm = LLM(max_length=256)
    drafter = llm.params.drafter
    assert isinstance(drafter, MixedDrafter) and isinstance(drafter.model, EagleDrafter)
    completions = llm.generate(PROMPTS, SamplingParams(max_tokens=128, stop_token_ids=()))
    assert np.mean([c.acceptance_length for c in completions]) >= 3.0


def test_model_and_head_stay_small():
    folders = (BUILT_IN_MODEL, BUILT_IN_HEAD)
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in folders]
    assert sizes[0] <= 12e6 and sum(sizes) <= 16e6


def test_other_models_are_drafted_for_without_weights(tmp_path):
    assert choose_drafter(BUILT_IN_MODEL, "auto") == f"{MIXED}{BUILT_IN_HEAD}"
    assert choose_drafter(tiny_llama(tmp_path), "auto") == "ngram"
    assert choose_drafter(BUILT_IN_MODEL, "none") == "none"


def test_the_head_of_smollm2_is_its_default_drafter():
    head = str(choose_drafter("smollm2", "auto"))
    assert head.startswith(MIXED) and choose_drafter("smollm2", "ngram") == "ngram"
    sizes = {"vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30}
    target = parse_model_config({"model_type": "llama", "num_attention_heads": 9} | sizes)
    loaded = load_eagle_head(head.removeprefix(MIXED), target, jnp.dtype("float32"))
    assert loaded.token_ids is not None and loaded.token_ids.size == 8192
    # On a CPU it is widened, and listens: its vocabulary is small.
    chain, dtype = SpeculationConfig.chain(3), jnp.dtype("float32")
    drafted = DraftedModel(Path(head.removeprefix(MIXED)), target, chain, dtype, None, False)
    drafter = load_drafter(head.removeprefix(MIXED), drafted)
    assert isinstance(drafter, EagleDrafter) and drafter.listens
    rounded, widened = nodes_of(loaded, Float8Linear), nodes_of(drafter.head, Linear)
    assert len(rounded) == len(widened) > 0 and not nodes_of(drafter.head, Float8Linear)
    for stored, wide in zip(rounded, widened, strict=True):
        exact = np.asarray(stored.values, np.float32) * np.asarray(stored.scale)[0][..., None]
        np.testing.assert_array_equal(wide.weight, np.moveaxis(exact, -1, 0))


FIRST_TOKENS = """
import sys, jaxspec
llm = jaxspec.LLM(max_length=64)
[completion] = llm.generate(["def f("], jaxspec.SamplingParams(max_tokens=2))
assert len(completion.token_ids) == 2
assert "torch" not in sys.modules, "torch was imported"
"""


@pytest.mark.slow
def test_generating_does_not_import_torch():
    command = [sys.executable, "-c", FIRST_TOKENS]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize(
    "speculation",
    [
        SpeculationConfig(num_nodes=6, max_depth=5, top_k=1, verify_width=20),
        SpeculationConfig(num_nodes=20, max_depth=5, top_k=4, verify_width=20),
    ],
    ids=["chain", "tree"],
)
def test_bfloat16_text_is_the_same_at_one_verify_width(speculation):
    sampling = SamplingParams(max_tokens=256)
    texts = [
        [c.token_ids for c in llm.generate(PROMPTS, sampling)]
        for llm in (
            LLM(drafter=drafter, dtype="bfloat16", speculation=speculation)
            for drafter in ("none", "ngram")
        )
    ]
    assert texts[0] == texts[1]


def test_the_default_tree():
    three, seven, nine = map(SpeculationConfig.chain, (3, 7, 9))
    assert load().speculation == default_speculation("cpu", built_in=True) == nine
    assert load(drafter="ngram").speculation == default_speculation("cpu", built_in=False) == three
    assert {default_speculation(name, built_in=True) for name in ("gpu", "tpu")} == {seven}


@pytest.mark.parametrize(
    ("options", "nodes"),
    [
        ([], 10),
        (["--deterministic"], 10),
        (["--verify-width", "10"], 10),
        (["--verify-width", "8"], 8),
        (["--acceptance", "rejection"], 8),
        (["--drafter", "ngram"], 4),
        (["--tree", "chain:3"], 4),
    ],
)
def test_the_default_tree_of_commands_fits_their_options(options: list[str], nodes: int):
    arguments = generate.make_parser().parse_args(options)
    assert speculation_config(arguments).num_nodes == nodes


def test_a_drafter_object_is_taken_as_it_is():
    drafter = NGramDrafter()
    assert load(drafter=drafter).drafter is drafter


def test_a_target_that_was_loaded_before_is_shared(plain: LLM):
    other = LLM(drafter="ngram", dtype="float32", max_length=512, target=plain.params.target)
    mine, shared = (jax.tree.leaves(llm.params.target) for llm in (plain, other))
    for one, same in zip(mine, shared, strict=True):
        assert one.unsafe_buffer_pointer() == same.unsafe_buffer_pointer()


def test_a_target_of_other_options_is_refused(plain: LLM, tmp_path):
    target = plain.params.target
    with pytest.raises(ValueError, match="weights in float32, not bfloat16"):
        load(drafter="none", dtype="bfloat16", target=target)
    with pytest.raises(ValueError, match="another model"):
        load(tiny_llama(tmp_path), "none", dtype="float32", target=target)
    with pytest.raises(ValueError, match="lies on other devices"):
        load(drafter="none", mesh=make_mesh(2, 1), target=target)
    small = load(drafter="none", dtype="float32", kv_dtype="fp8").target
    with pytest.raises(ValueError, match="keeps 8-bit keys and values"):
        load(drafter="none", dtype="float32", target=small)
    load(drafter="none", dtype="float32", kv_dtype="fp8", target=small)
    with pytest.raises(ValueError, match="for a pipeline"):
        load(drafter="none", mesh=make_mesh(pipeline_parallel=2), target=target)
