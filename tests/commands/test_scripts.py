"""The command lines, run as a user runs them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec import BUILT_IN_MODEL
from jaxspec.commands import generate
from jaxspec.commands.generate import generation
from tests.helpers.checkpoints import tiny_byte_llama, tiny_eagle3_head, tiny_llama
from tests.helpers.marks import slow

ROOT = Path(__file__).parents[2]

GENERATE_KEYS = {
    *("text", "token_ids", "num_tokens", "num_rounds", "acceptance_length"),
    *("acceptance_by_depth", "decode_tokens_per_second", "prefill_seconds", "decode_seconds"),
    *("model", "drafter", "device", "kernels", "finish_reason", "error", "seed"),
}


def run_script(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"scripts/{name}.py", *map(str, arguments)]
    # This checkout, whatever is installed; compiled quickly, as the default tests are.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )


@pytest.mark.slow
def test_generate_compares_with_plain_decoding_as_json(capsys: pytest.CaptureFixture[str]):
    arguments = ("--drafter", "ngram", "--compare", "--json", "--max-tokens", "64")
    arguments = (*arguments, "--no-compilation-cache", "--temperature", "0", "--seed", "7")
    assert generate.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert not GENERATE_KEYS - set(report)
    assert report["identical"] is True
    assert report["speedup"] > 0
    assert report["num_tokens"] == len(report["token_ids"]) == 64
    assert report["acceptance_length"] > 1
    assert (report["seed"], report["error"], report["kernels"]) == (7, None, "none")


# That a second process finds the programs of the first is slow.
@pytest.mark.parametrize("runs", [1, slow(2)])
def test_generate_prints_a_summary_and_keeps_compiled_programs(tmp_path: Path, runs: int):
    model, cache, found = tiny_byte_llama(tmp_path / "model"), tmp_path / "programs", []
    arguments = ("--model", model, "--max-tokens", 16, "--compilation-cache", cache)
    arguments += ("--temperature", 0, "--tree", "chain:2")  # small programs
    for _ in range(runs):
        result = run_script("generate", *arguments)
        assert result.returncode == 0, result.stderr
        assert "def read_config(path):" in result.stdout
        *_, rounds, depths, speed = result.stdout.splitlines()  # lines of a pipe are not wrapped
        assert "acceptance length" in rounds and depths.startswith("accepted by depth: ")
        assert speed.startswith("prefill ") and "tokens/s" in speed and "programs ready" in speed
        found.append({file.name for file in cache.iterdir() if file.name.endswith("-cache")})
    assert found[0] == found[-1] != set()


def test_an_error_is_shown():
    shown = dict.fromkeys(GENERATE_KEYS, 0) | {
        "acceptance_by_depth": [], "finish_reason": "error", "error": "no finite logits",
        "prefill_tokens_per_second": 1.0, "compile_seconds": 1.0,
    }  # fmt: skip
    printed = generation.summary(shown)
    assert "(error)" in printed and "error: no finite logits" in printed


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Things a user may point at by mistake."""
    root = tmp_path_factory.mktemp("broken")
    whole = shutil.ignore_patterns("*.safetensors")
    corrupt = Path(shutil.copytree(BUILT_IN_MODEL, root / "corrupt", ignore=whole))
    with (BUILT_IN_MODEL / "model.safetensors").open("rb") as weights:
        (corrupt / "model.safetensors").write_bytes(weights.read(1000))
    wide = tiny_llama(root / "wide", hidden_size=128)
    return {"corrupt": corrupt, "head": tiny_eagle3_head(root / "head", wide), "model": wide}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "x = 1\n" * 400, "--max-length", "64"], "raise max_length"),
        (["--model", "/no/such/directory"], "no directory /no/such/directory"),
        (["--model", "{corrupt}"], "not a readable safetensors file"),
        (["--temperature", "-1"], "temperature must be a finite number, at least 0"),
        (
            ["--tree", "60:8:8", "--num-pages", "4"],
            "pages of 16, there are 4",
        ),
        (["--drafter", "{head}"], "vocab_size is 320, not 4096"),
        (["--drafter", "{model}"], "must share at least 50%, or draft as text:"),
        (["--prompt-file", "/no/such/file"], "cannot read /no/such/file"),
        (["--tree", "60"], "'60' is not plain, chain:K or NODES:DEPTH:TOPK"),
        (["--tree", "4:5:2"], "num_nodes (4) must exceed max_depth (5)"),
        (["--tp", "64"], "needs 64 devices"),
        (["--tp", "8x8"], "needs 64 devices, this process has 8"),
        (["--tp", "2", "--sp", "8"], "needs 16 devices, this process has 8; sp 4 fits"),
        (["--sp", "3"], "page_size 16 cannot be split over 3 devices; it can over 1, 2, 4"),
        (["--tp", "5x1"], "hidden_size 256 cannot be split over 5 devices; it can over 1, 2, 4, 8"),
        (["--proposal", "sampled"], "proposal 'sampled' does not go with acceptance 'match'"),
        (["--kernels", "all"], "the kernels are for Hopper GPUs, not for cpu"),
        (["--kernels", "topk"], "no kernel is called 'topk'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(broken, arguments, message, capsys):
    arguments = [argument.format(**broken) for argument in arguments]
    assert generate.main([*arguments, "--no-compilation-cache"]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert message in line


def test_the_exit_code_reaches_the_shell():
    result = run_script("generate", "--model", "/no/such/directory")
    assert result.returncode == 2
    [line] = [line for line in result.stderr.splitlines() if line.strip()]
    assert line.startswith("jaxspec generate: no directory /no/such/directory")


def test_the_built_in_model_is_small_and_says_where_it_comes_from():
    size = sum(path.stat().st_size for path in BUILT_IN_MODEL.iterdir())
    assert size <= 12e6
    card = (BUILT_IN_MODEL / "README.md").read_text(encoding="utf-8")
    for word in ("held-out loss", "steps", "Licence", "Data"):
        assert word in card
