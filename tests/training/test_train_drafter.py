"""The command that trains heads: what it writes, what it refuses, and that its heads draft."""

from pathlib import Path

import pytest

from jaxspec import LLM, SamplingParams, SpeculationConfig
from jaxspec.commands import train_drafter
from jaxspec.models.json.values import read_json
from tests.helpers.checkpoints import tiny_byte_llama

BLOCKS = ["--block-size", "5", "--layers", "1", "--ff", "32", "--anchors", "6", "--method"]
MANY_PROBLEMS = ["--method", "dflash2", "--block-size", "1", "--anchors", "0", "--length", "4096"]
MANY_PROBLEMS += ["--draft-vocab", "9", "--keep-text"]
# Arguments, and what the card says.
RUNS = {
    "eagle3": (["--unroll", "2", "--draft-vocab", "60"], ["EAGLE3 draft head", "60 tokens"]),
    "dspark": ([*BLOCKS, "dspark"], ["DSPARK draft head", "at up to 6 places of a row"]),
    "dflash": ([*BLOCKS, "dflash"], ["DFLASH draft head", "at up to 6 places of a row"]),
    "dflash2": (
        [*BLOCKS, "dflash2", "--selector-rank", "8", "--candidates", "6"],
        ["DFLASH2 draft head", "chooses among 6 candidates"],
    ),
    "lilicorr": (
        [*BLOCKS, "lilicorr", "--lattice-width", "16", "--candidates", "4", "--taps", "2"],
        ["LILICORR draft head", "chooses among 4 candidates"],
    ),
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "/no/such/folder"], "no such file or folder"),
        (["--data", "{empty}"], "is empty"),
        (["--length", "4096"], "--length 4096 exceeds the model's 2048"),
        (["--draft-vocab", "5000"], "1 to 4096 tokens"),
        (["--batch", "7", "--accumulation", "2"], "multiple of accumulation"),
        (["--model", "/no/such/model"], "no directory"),
        (["--resume"], "no checkpoint to resume from"),
        (["--steps", "0"], "must be at least 1"),
        (["--unroll", "0"], "--unroll must be at least 1, got 0"),
        (
            ["--layers", "0", "--ff", "0"],
            "--layers must be at least 1, got 0; --ff must be at least 1",
        ),
        (["--draft-vocab", "0"], "1 to 4096 tokens"),
        (["--capture", "1", "99"], "distinct, of 0 to 8"),
        (["--method", "eagle1", "--draft-vocab", "9"], "drafts every token"),
        (["--method", "eagle1", "--anchors", "8"], "--method eagle1 does not take --anchors"),
        (["--method", "mtp", "--layers", "2"], "--method mtp does not take --ff and --layers"),
        (["--block-size", "8"], "eagle3 does not take --block-size"),
        (["--answers", "."], "--answers would do nothing: add --regenerate"),
        (["--keep-text"], "--keep-text would do nothing: add --regenerate"),
        (["--regenerate-rows", "0"], "--regenerate-rows would do nothing"),
        (["--regenerate-batch", "8"], "--regenerate-batch would do nothing"),
        (
            ["--prompt-tokens", "8", "--regenerate-temperatures", "0"],
            "--prompt-tokens and --regenerate-temperatures would do nothing",
        ),
        (["--regenerate", "--regenerate-rows", "0"], "at least 1, got 0"),
        (["--regenerate", "--regenerate-batch", "-1"], "at least 1, got -1"),
        (["--regenerate", "--prompt-tokens", "0"], "at least 1, got 0"),
        (["--length", "0"], "rows of 0 tokens hold no text"),
        (["--attention", "cudnn"], "needs bfloat16 and a GPU"),
        (["--out", "{empty}"], "File exists"),
        (
            ["--method", "dflash", "--unroll", "3", "--draft-vocab", "9"],
            "--method dflash does not take --draft-vocab and --unroll",
        ),
        (["--method", "dflash", "--markov-rank", "8"], "dflash does not take --markov-rank"),
        (
            ["--method", "dflash", "--candidates", "8", "--taps", "2", "--lattice-width", "16"],
            "--method dflash does not take --lattice-width and --candidates and --taps",
        ),
        (["--method", "lilicorr", "--selector-rank", "8"], "does not take --selector-rank"),
        (
            ["--method", "lilicorr", "--candidates", "5", "--lattice-width", "20", "--taps", "9"],
            "among 2, 4, 8 or 16 candidates, got 5; the lattice's width must be a multiple of 8, "
            "got 20; in blocks of 8 lilicorr has 0 to 8 taps, got 9",
        ),
        (
            ["--method", "dflash2", "--candidates", "1", "--taps", "0", "--selector-rank", "0"],
            "rank must be at least 1, got 0; dflash2 chooses among 2 to 4096 candidates, got 1; "
            "in blocks of 8 dflash2 has 1 to 8 taps, got 0",
        ),
        (
            ["--method", "dflash", "--capture", "4", "9"],
            "--capture must be increasing, from 0 to 8, got 4 9",
        ),
        (
            [*MANY_PROBLEMS, "--mask-token", "-1", "--capture", "4", "4"],
            "--length 4096 exceeds the model's 2048; --method dflash2 does not take --draft-vocab; "
            "--keep-text would do nothing: add --regenerate; --anchors must be at least 1, got 0; "
            "--block-size must be at least 2, got 1; --mask-token -1 is no id of the model's 4096 "
            "tokens; --capture must be increasing, from 0 to 8, got 4 4",
        ),
        (["--method", "dflash", "--block-size", "65"], "leave nothing to learn to 64 steps"),
        (
            ["--method", "dspark", "--markov-rank", "-1", "--mask-token", "4096"],
            "--markov-rank must be at least 0, got -1; --mask-token 4096 is no id of the model's",
        ),
    ],
    ids=str,
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    sources: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    fixed = ["--data", str(sources), "--out", str(tmp_path / "o"), "--work", str(tmp_path / "w")]
    fixed += ["--steps", "1", "--ff", "64", "--length", "64", "--batch", "8"]
    arguments = [argument.format(empty=empty) for argument in arguments]
    assert train_drafter.main([*fixed, *arguments]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert message in line


@pytest.mark.slow
@pytest.mark.parametrize("method", RUNS)
def test_the_script_trains_exports_and_goes_on(
    method: str, sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model = tiny_byte_llama(tmp_path / "model")
    more, shown = RUNS[method]
    arguments = [
        *("--model", str(model), "--data", str(sources), "--steps", "4", *more),
        *("--work", str(tmp_path / "work"), "--length", "32", "--batch", "8"),
        *("--regenerate", "--keep-text", "--regenerate-rows", "6", "--prompt-tokens", "8"),
        *("--license-note", "Free."),
    ]
    out = tmp_path / "head"
    assert train_drafter.main([*arguments, "--out", str(out)]) == 0, capsys.readouterr().err
    assert len((out / "log.jsonl").read_text().splitlines()) >= 2
    assert (out / "training.png").stat().st_size > 10_000
    card = (out / "README.md").read_text()
    assert all(text in card for text in ("4 steps of 8 rows", "Free.", *shown))
    assert ("| confidence |" in card) == (method == "dspark")
    if method != "eagle3":
        assert read_json(out / "config.json")["block_size"] == 5
    again = tmp_path / "again"
    assert train_drafter.main([*arguments, "--resume", "--out", str(again)]) == 0
    weights = "model.safetensors"
    assert (again / weights).read_bytes() == (out / weights).read_bytes()
    trees = SpeculationConfig.chain(3), SpeculationConfig(num_nodes=8, max_depth=4, top_k=3)
    llms = [LLM(model, out, speculation=tree, max_length=64) for tree in trees]
    llms.append(LLM(model, "none", max_length=64))
    texts = [
        llm.generate(["def f(x):"], SamplingParams(max_tokens=20))[0].token_ids for llm in llms
    ]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dspark", "dflash", "dflash2", "lilicorr"])
def test_a_block_head_of_the_built_in_model_drafts_better_than_at_the_start(
    method: str, sources: Path, tmp_path: Path
):
    arguments = [
        *("--data", str(sources), "--method", method, "--work", str(tmp_path / "work")),
        *("--length", "64", "--batch", "8", "--block-size", "4", "--anchors", "16", "--ff", "128"),
        *("--layers", "1", "--warmup", "5", "--lr", "3e-3"),
    ]
    prompt = (sources / "a.py").read_text()[:100]
    lengths = []
    for steps in ("1", "60"):
        out = tmp_path / steps
        assert train_drafter.main([*arguments, "--steps", steps, "--out", str(out)]) == 0
        llm = LLM(drafter=out, speculation=SpeculationConfig.chain(3), max_length=128)
        [completion] = llm.generate([prompt], SamplingParams(max_tokens=40))
        lengths.append(completion.acceptance_length)
    assert lengths[1] > max(1.5, lengths[0])
