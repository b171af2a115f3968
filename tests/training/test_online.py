"""A head that learns while it serves, and the command line around it."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams, SpeculationConfig
from jaxspec.commands import adapt_drafter
from jaxspec.decoding.drafters import EagleDrafter
from jaxspec.models.linear import Linear
from jaxspec.models.nodes import map_nodes, nodes_of
from jaxspec.models.quantized.float8 import Float8Linear, rounded_to_float8
from jaxspec.training.heads.loss import LossConfig
from jaxspec.training.heads.step import DraftTrainConfig
from jaxspec.training.online import HeadAdapter, as_served, to_train
from tests.helpers.checkpoints import tiny_byte_llama, tiny_eagle3_head
from tests.helpers.marks import slow
from tests.helpers.programs import traces

SAMPLING = SamplingParams(max_tokens=40, stop_token_ids=())
PROMPTS = ["def f(x):", "import os", "class A:", "return 1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_byte_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def head(model, tmp_path_factory) -> Path:
    return tiny_eagle3_head(tmp_path_factory.mktemp("head"), model, draft_vocab=257)


def make_llm(model: Path, drafter: str | Path) -> LLM:
    return LLM(model, drafter, speculation=SpeculationConfig.chain(3), max_length=64)


@pytest.mark.slow
def test_a_head_learns_what_it_serves_and_the_text_stays(model, head):
    llm = make_llm(model, head)
    config = DraftTrainConfig(
        loss=LossConfig(steps=3),
        batch_size=4,
        learning_rate=1e-2,
        warmup_steps=4,
        compute_dtype="float32",
    )
    adapter = HeadAdapter(llm, config, length=64)
    with pytest.warns(UserWarning, match="is of no use here"):  # it has learnt nothing yet
        before = llm.generate(PROMPTS, SAMPLING)
    compiled = traces(llm.engine.programs.decode)
    accuracies = [adapter.learn(before, steps=20)["accuracy"] for _ in range(6)]
    after = llm.generate(PROMPTS, SAMPLING)
    assert [c.token_ids for c in after] == [c.token_ids for c in before]
    lengths = [np.mean([c.acceptance_length for c in each]) for each in (before, after)]
    assert accuracies[0] < 0.3 and accuracies[-1] > 0.6
    assert lengths[0] < 1.2 and lengths[1] > 2
    assert traces(llm.engine.programs.decode) == compiled


def test_a_head_in_8_bit_floats_is_trained_as_what_it_stands_for(model, head):
    """What is trained are the weights that serve, and without a step they are rounded alike."""
    loaded = make_llm(model, head).params.drafter
    assert isinstance(loaded, EagleDrafter)
    served = map_nodes(loaded.head, rounded_to_float8, Linear)
    trained = to_train(served)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(trained.layers))
    for before, after in zip(
        nodes_of(served, Float8Linear), nodes_of(trained, Linear), strict=True
    ):
        dense = np.moveaxis(np.asarray(before.dense(jnp.dtype("float32"))), -1, 0)
        np.testing.assert_array_equal(after.weight, dense)
    again = as_served(trained, served)
    assert jax.tree.structure(again) == jax.tree.structure(served)
    for before, after in zip(
        nodes_of(served, Float8Linear), nodes_of(again, Float8Linear), strict=True
    ):
        dense = (np.asarray(each.dense(jnp.dtype("float32"))) for each in (before, after))
        np.testing.assert_allclose(*dense, rtol=1e-5)


@pytest.mark.parametrize("bits", [slow(4), 8])  # both are refused by one check
def test_a_head_in_integers_is_refused(model, head, bits):
    speculation = SpeculationConfig.chain(3)
    llm = LLM(model, head, drafter_bits=bits, speculation=speculation, max_length=64)
    with pytest.raises(ValueError, match="in integers or 4-bit floats cannot learn"):
        HeadAdapter(llm, DraftTrainConfig(), length=64)


def test_learning_needs_a_step_and_texts(model, head):
    adapter = HeadAdapter(make_llm(model, head).engine, DraftTrainConfig(), length=64)
    for rows, steps in (([], 1), ([([1, 2], [3, 4])], 0)):
        with pytest.raises(ValueError, match="at least one step and one completion"):
            adapter.learn_ids(rows, steps)


@pytest.mark.slow
def test_a_head_learns_from_token_ids(model, head):
    """Texts longer than a row are cut, and the head in use is another one after each call, be it an
    LLM's or an engine's."""
    llm = make_llm(model, head)
    config = DraftTrainConfig(
        loss=LossConfig(steps=2), batch_size=4, learning_rate=1e-2, warmup_steps=1,
        compute_dtype="float32",
    )  # fmt: skip
    adapter = HeadAdapter(llm.engine, config, length=16)
    rows = [([1, 2, 3], [*range(4, 4 + count)]) for count in (5, 40)]
    before = llm.params.drafter
    losses = [adapter.learn_ids(rows, steps=10)["loss"] for _ in range(4)]
    assert losses[-1] < losses[0] - 0.3  # of a random target it does not come near 0
    assert llm.params.drafter is not before
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), before, llm.params.drafter)
    assert any(jax.tree.leaves(changed))


def test_only_a_drafter_of_the_same_shapes_is_taken(model, head, tmp_path):
    llm = make_llm(model, head)
    drafter = llm.params.drafter
    llm.use_drafter(jax.tree.map(lambda x: x, drafter))
    other = make_llm(model, tiny_eagle3_head(tmp_path, model, draft_vocab=96)).params.drafter
    assert isinstance(drafter, EagleDrafter)
    recycling = drafter.replace(head=drafter.head.replace(recycle_normed=True))
    for wrong in (other, recycling):
        with pytest.raises(ValueError, match="other shapes or static fields"):
            llm.use_drafter(wrong)


def test_only_a_head_learns(model):
    with pytest.raises(ValueError, match="only an EAGLE head learns"):
        HeadAdapter(make_llm(model, "ngram"), DraftTrainConfig(), length=64)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the drafter .* is of no use here")  # before it has learnt
def test_the_script_measures_before_and_after(model, head, sources, tmp_path, capsys):
    code = adapt_drafter.main(
        ["--model", str(model), "--drafter", str(head), "--data", str(sources), "--batch", "4",
         "--batches", "3", "--steps-per-batch", "40", "--lr", "1e-2", "--prompt-tokens", "8",
         "--max-tokens", "24", "--held-out", "8", "--mode", "chain:3", "--json",
         "--out", str(tmp_path / "out"), "--plot", str(tmp_path / "plot.png")]
    )  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0, printed.err
    results = json.loads(printed.out)
    assert results["after"]["length"] > results["before"]["length"]
    assert len(results["served"]) == 3
    assert (tmp_path / "plot.png").stat().st_size > 5_000
    assert isinstance(make_llm(model, tmp_path / "out").params.drafter, EagleDrafter)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "ngram"], "only an EAGLE head learns"),
        (["--data", "/no/such/data"], "no such file or folder"),
        (["--mode", "tree"], "not plain, chain:K"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, sources, capsys):
    data = [] if "--data" in arguments else ["--data", str(sources)]
    assert adapt_drafter.main([*data, *arguments]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert line.startswith("jaxspec adapt-drafter: ") and message in line
