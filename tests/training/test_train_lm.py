"""Training a tiny language model on this repository's sources, and its export."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from jaxspec import BUILT_IN_MODEL, SpeculationConfig
from jaxspec.checkpoints.load import load
from jaxspec.commands import train_lm
from jaxspec.config.model import ModelConfig
from jaxspec.decoding.drafters import DraftModelDrafter
from jaxspec.training import data
from jaxspec.training.data import Corpus
from jaxspec.training.lm.model import TrainConfig
from jaxspec.training.lm.report import LMCard, export
from jaxspec.training.lm.run import Pretraining, sample
from jaxspec.training.optimizer import learning_rate
from jaxspec.training.schedule import Schedule
from jaxspec.training.vocabulary import END_OF_TEXT, vocabulary_of
from tests.helpers.compilations import Compilations
from tests.helpers.sampling_reference import plain_logits
from tests.training.tiny_lm import tiny_lm

ROOT = Path(__file__).resolve().parents[2]
CONFIG = TrainConfig(
    batch_size=4, context=32, learning_rate=1e-2, warmup_steps=4, compute_dtype="float32"
)
SCHEDULE = Schedule(
    steps=24, steps_per_call=5, seconds_per_call=math.inf, evaluate_every=12, save_every=12
)
ODD_TEXTS = (
    "\tif x:\r\n\t\treturn 'naïve' != 12345\r\n\r\n",
    "日本語のテキスト 🎉👩‍👩‍👧 ∑ᵢ xᵢ² \u200b\ufeff",
    " " * 37 + "deep  \n   \n\n\n    # trailing   ",
    "\x00\x01\x7f control, a lone \r and <|endoftext|> in the text",
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return data.build_corpus([ROOT / "jaxspec"], tmp_path_factory.mktemp("cache"), 400)


@pytest.fixture(scope="module")
def model(corpus: Corpus) -> ModelConfig:
    return tiny_lm(corpus)


@pytest.fixture(scope="module")
def trained(
    corpus: Corpus, model: ModelConfig, tmp_path_factory: pytest.TempPathFactory
) -> Pretraining:
    run = Pretraining(model, CONFIG, corpus, SCHEDULE, tmp_path_factory.mktemp("run"))
    list(run.run())
    return run


@pytest.fixture(scope="module")
def exported(trained: Pretraining, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    card = LMCard(
        name="tiny", device="a CPU", command="train", license_note="Apache-2.0", sample="x = 1"
    )
    export(trained, card, folder)
    return folder


# Data


def write(folder: Path, name: str, text: str | bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def test_gather_keeps_source_text_and_says_what_it_skips(tmp_path: Path):
    write(tmp_path, "a.py", "def f(x):\n    return x\n")
    write(tmp_path, "deep/b.md", "# Title\n\nSome words.\n")
    write(tmp_path, "copy.py", "def f(x):\n    return x\n")
    write(tmp_path, "latin.py", b"# caf\xe9\n")
    write(tmp_path, "min.py", "x = 1; " * 500)
    write(tmp_path, "table.py", "T = [\n" + "    0x12, 0x34, 0x56,\n" * 50 + "]\n")
    write(tmp_path, "made.py", "# Automatically generated from a.in\nname = 'value'\n")
    write(tmp_path, "empty.py", "\n\n")
    write(tmp_path, "ignored.json", "{}")
    write(tmp_path, "site-packages/other.py", "import this\n")
    documents, sources, skipped = data.gather([tmp_path])
    root = tmp_path.name
    assert [d.name for d in documents] == [f"{root}/a.py", f"{root}/deep/b.md"]
    assert sources == {str(tmp_path): (2, 44)}
    reasons = {"duplicate", "not UTF-8", "long lines", "data table", "generated", "empty or binary"}
    assert skipped == dict.fromkeys(reasons, 1)


def test_an_empty_folder_is_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no usable text file \(\.py \.txt \.md\) in /"):
        data.gather([tmp_path])
    with pytest.raises(ValueError, match="no such file or folder"):
        data.gather([tmp_path / "missing"])


def test_held_out_files_do_not_depend_on_where_the_folder_lies(tmp_path: Path):
    held_out = []
    for place in ("here", "there/deep"):
        for i in range(200):
            write(tmp_path / place, f"project/{i}.py", f"value = {i}  # words of file\n")
        documents, _, _ = data.gather([tmp_path / place / "project"])
        train, kept = data.split(documents, [d.name for d in documents], 0.05)
        assert len(train) + len(kept) == 200
        held_out.append([d.name for d in kept])
    assert held_out[0] == held_out[1]
    assert 2 <= len(held_out[0]) <= 20


def test_what_was_held_out_from_a_published_model_stays_held_out():
    names = [f"project/{i}.py" for i in range(300)]
    train, held_out = data.split(range(300), names, data.HELD_OUT_FRACTION)
    assert held_out == [122, 150, 200, 250, 281, 285]
    assert sorted(train + held_out) == list(range(300))
    assert data.split(range(5), names[:5], data.HELD_OUT_FRACTION)[1] == [3]  # the least hash
    with pytest.raises(ValueError, match="at least two documents"):
        data.split(range(1), names[:1], data.HELD_OUT_FRACTION)


@pytest.mark.slow
@pytest.mark.parametrize("text", ODD_TEXTS)
def test_the_tokenizer_round_trips_any_text(corpus: Corpus, exported: Path, text: str):
    ids = corpus.tokenizer.encode(text).ids
    assert corpus.tokenizer.decode(ids, skip_special_tokens=False) == text
    loaded = AutoTokenizer.from_pretrained(exported)
    assert loaded(text)["input_ids"] == ids
    assert loaded.decode(ids) == text


def test_digits_stand_alone_and_indentation_is_one_token(corpus: Corpus):
    tokens = corpus.tokenizer.encode("        return x[1234]").tokens
    assert tokens[0] == "Ġ" * 7
    assert [t for t in tokens if t.isdigit()] == list("1234")


def test_documents_are_joined_by_end_of_text_only(corpus: Corpus):
    end = corpus.vocabulary.end_of_text_id
    texts = [f"one {END_OF_TEXT} two", "three"]
    tokens = corpus.vocabulary.encode(texts)
    assert tokens.dtype == np.uint16
    (ends,) = np.nonzero(tokens == end)
    assert len(ends) == 2 and ends[1] == len(tokens) - 1
    assert corpus.tokenizer.decode(list(tokens[: ends[0]])) == texts[0]


def test_the_cache_is_used_until_a_file_changes(tmp_path: Path):
    for i in range(3):
        write(tmp_path, f"text/{i}.py", f"def function_{i}():\n    return 'value'\n")
    build = [tmp_path / "text"], tmp_path / "cache", 260
    first = data.build_corpus(*build)
    stamp = (tmp_path / "cache/train.npy").stat().st_mtime_ns
    again = data.build_corpus(*build)
    assert (tmp_path / "cache/train.npy").stat().st_mtime_ns == stamp
    np.testing.assert_array_equal(first.train, again.train)
    assert again.report.train_tokens == first.report.train_tokens
    write(tmp_path, "text/0.py", "something = 'else'\n")
    assert data.build_corpus(*build).report != first.report


# Training


def test_the_loss_goes_down(trained: Pretraining):
    values = [r.held_out_loss for r in trained.records if r.held_out_loss is not None]
    assert len(values) == 3
    assert abs(values[0] - np.log(trained.model.vocab_size)) < 0.3
    assert values[-1] < values[0] - 0.8
    assert trained.records[-1].step == 24


def test_resume_equals_an_uninterrupted_run(
    trained: Pretraining, corpus: Corpus, model: ModelConfig, tmp_path: Path
):
    # Stopped after the checkpoint of step 12, with other calls on the way.
    schedule = dataclasses.replace(SCHEDULE, steps_per_call=4)
    for record in Pretraining(model, CONFIG, corpus, schedule, tmp_path).run():
        if record.step == 16:
            break
    resumed = Pretraining(model, CONFIG, corpus, schedule, tmp_path, resume=True)
    assert resumed.step == 12
    list(resumed.run())
    jax.tree.map(np.testing.assert_array_equal, trained.state, resumed.state)
    steps = [r.step for r in resumed.records]
    assert steps == sorted(set(steps)) and steps[-1] == 24
    assert resumed.records[-1].held_out_loss == trained.records[-1].held_out_loss
    other = dataclasses.replace(CONFIG, learning_rate=1e-3)
    with pytest.raises(ValueError, match="another model, data or training configuration"):
        Pretraining(model, other, corpus, schedule, tmp_path, resume=True)


@pytest.mark.slow
def test_two_devices_train_as_one(
    trained: Pretraining, corpus: Corpus, model: ModelConfig, tmp_path: Path
):
    run = Pretraining(model, CONFIG, corpus, SCHEDULE, tmp_path, data_parallel=2)
    records = list(run.run())
    assert len(run.params.embed.devices()) == 2
    together, alone = (
        np.array([r.loss for r in rs[1:]], float) for rs in (records, trained.records)
    )  # the first record is of the untrained model
    np.testing.assert_allclose(together, alone, rtol=1e-3)


def test_the_learning_rate_rises_stays_and_falls():
    config = TrainConfig(learning_rate=1.0, warmup_steps=10, decay_fraction=0.5)
    rates = [float(learning_rate(config, jnp.int32(s), jnp.int32(100))) for s in range(101)]
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 10, rtol=1e-6)
    assert set(rates[10:51]) == {1.0}
    np.testing.assert_allclose(rates[50:], np.arange(50, -1, -1) / 50, rtol=1e-6)


def test_samples_continue_the_prompt(trained: Pretraining):
    prompt = trained.corpus.tokenizer.encode("def f(").ids
    first, again, other = (
        sample(trained.params, prompt, 8, temperature, seed=seed)
        for temperature, seed in ((0.0, 0), (0.0, 1), (1.0, 0))
    )
    assert first[: len(prompt)] == other[: len(prompt)] == prompt
    assert len(first) == len(prompt) + 8
    assert first == again != other


def test_the_sample_is_compiled_before_steps_are_timed(
    corpus: Corpus, tmp_path: Path, compilations: Compilations
):
    prompt, length = [1, 2, 3], 13  # of no other test
    schedule = Schedule(steps=2, steps_per_call=1)
    model = tiny_lm(corpus)
    run = Pretraining(model, CONFIG, corpus, schedule, tmp_path, sample_length=length)
    records = run.run()
    next(records)
    compilations.clear()
    sample(run.params, prompt, length - len(prompt), 0.0, seed=0)
    list(records)
    sample(run.params, prompt, length - len(prompt), 0.0, seed=0)
    names = {name for name, _ in compilations}
    assert not names & {"jit(continue_text)", "jit(train_steps)", "jit(evaluate)"}


# Export


def test_transformers_gives_the_same_logits(trained: Pretraining, exported: Path):
    theirs = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokens = np.asarray(trained.corpus.held_out[:48], np.int32)[None]
    params = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), trained.params
    )
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens, dtype=torch.int64)).logits.numpy()
    np.testing.assert_allclose(plain_logits(params, tokens), expected, rtol=1e-4, atol=1e-4)
    assert theirs.generation_config.eos_token_id == trained.model.stop_token_ids[0]


def test_the_export_is_complete(exported: Path):
    names = {path.name for path in exported.iterdir()}
    assert names == {
        "README.md", "config.json", "generation_config.json", "loss.jsonl", "loss.png",
        "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    card = (exported / "README.md").read_text()
    assert "Apache-2.0" in card and "bits a byte" in card and "| jaxspec |" in card


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the built-in model."""
    folder = tmp_path_factory.mktemp("drafting")
    for i in range(4):
        write(folder, f"text/{i}.py", f"def function_{i}(x):\n    return x + {i}\n" * 40)
    arguments = ["--data", str(folder / "text"), "--work", str(folder / "work")]
    sizes = ["--hidden", "32", "--layers", "1", "--ff", "64", "--context", "32", "--batch", "8"]
    draft_for = ["--draft-for", str(BUILT_IN_MODEL), "--steps", "2", "--sample-tokens", "1"]
    assert train_lm.main([*arguments, "--out", str(folder / "draft"), *sizes, *draft_for]) == 0
    return folder / "draft"


def test_a_draft_model_takes_the_tokenizer_of_its_target(draft_model: Path):
    target, out = BUILT_IN_MODEL, draft_model
    text = "if x == 12:\n\treturn 'naïve'"
    theirs, own = (AutoTokenizer.from_pretrained(folder) for folder in (target, out))
    assert own(text)["input_ids"] == theirs(text)["input_ids"] and own.eos_token == theirs.eos_token
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 4096
    assert f"drafts for {target}" in (out / "README.md").read_text()
    drafter = load(target, out, speculation=SpeculationConfig.chain(2)).drafter
    assert isinstance(drafter, DraftModelDrafter) and drafter.model.config.vocab_size == 4096


def test_documents_for_a_draft_model_are_whole_and_begin_as_its_targets_texts(tmp_path: Path):
    shutil.copytree(BUILT_IN_MODEL, tmp_path / "target")
    path, text = str(tmp_path / "target/tokenizer.json"), "one two three four"
    tokenizer = Tokenizer.from_file(path)
    ids, end = tokenizer.encode(text).ids, tokenizer.token_to_id(END_OF_TEXT)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=32, pad_id=7)
    specials = [("<s>", 5), (END_OF_TEXT, end)]
    tokenizer.post_processor = TemplateProcessing(f"<s> $A {END_OF_TEXT}", special_tokens=specials)
    tokenizer.save(path)
    assert len(ids) > 2
    own = vocabulary_of(tmp_path / "target").encode([text, text])
    assert own.tolist() == 2 * [5, *ids, end]


def test_a_target_that_cannot_end_a_text_is_named(tmp_path: Path):
    shutil.copytree(BUILT_IN_MODEL, tmp_path / "target")
    path = tmp_path / "target/tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["eos_token"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"tokenizer of .*target names no eos_token to end"):
        vocabulary_of(tmp_path / "target")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attention", "cudnn"], "needs bfloat16 and a GPU"),
        (["--draft-for", "{file}"], "--vocab and --draft-for exclude each other"),
        (["--context", "4096"], "--context 4096 exceeds --max-position 2048"),
        (["--work", "{file}"], "File exists"),
        (["--prompt", ""], "--prompt is empty"),
        (["--sample-tokens", "-1"], "--sample-tokens must be at least 0, got -1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, tmp_path, capsys):
    for name in ("a.py", "b.py"):
        write(tmp_path, name, f"def {name[0]}(x):\n    return x\n" * 20)
    fixed = ["--data", str(tmp_path), "--out", str(tmp_path / "o"), "--steps", "1"]
    work = [] if "--work" in arguments else ["--work", str(tmp_path / "work")]
    arguments = [argument.format(file=tmp_path / "a.py") for argument in arguments]
    assert train_lm.main([*fixed, *work, "--vocab", "260", *arguments]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert line.startswith("jaxspec train-lm: ") and message in line
