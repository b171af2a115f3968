"""Options that cannot be, or do not go together, end a command with one line and exit code 2."""

import shlex
from pathlib import Path

import pytest
from jaxlib.version import __version__ as JAXLIB_VERSION

import jaxspec.__main__ as command_line
from jaxspec.evaluation.benchmarks.ahead_of_time import WHEELS
from tests.helpers.marks import slow

TINY = "--shape tiny --dtype float32"
DEFAULTS = {
    "bench adaptive": TINY,
    "bench drafters": "--data {sources}",
    "bench engine": f"{TINY} --context 20",
    "bench serving": f"{TINY} --page-size 8",
    "eval-drafter": "--data {sources} --prompt-tokens 16 --prompts 2",
    "profile-round": f"{TINY} --page-size 16",
    "profile-prompt": f"{TINY} --page-size 16",
}
CASES = [
    ("bench adaptive", "--new-tokens 1", "--new-tokens must be at least 2"),
    ("bench adaptive", "--seconds -1", "--seconds, --warm-up and --phase-seconds must be at least"),
    ("bench adaptive", "--seconds 0 --phase-seconds 0", "there is nothing to run"),
    ("bench adaptive", "--trees chain:1,chain:3", "--trees must begin with plain"),
    ("bench adaptive", "--trees plain", "--trees must begin with plain"),
    ("bench adaptive", "--levels 2", "acceptance levels must lie in 0 .. 1"),
    ("bench collectives", "--grids 2y2", "'2y2' is not a number of devices, or XxY as in 2x2"),
    ("bench collectives", "--grids 4,1", "each needs at least two devices"),
    ("bench collectives", "--sp 0", "--sp must be at least 1"),
    ("bench collectives", "--wheels /no/such", "run: pip install --target /no/such"),
    ("bench drafters", "--run ngram chain", "not plain, chain:K"),
    ("bench drafters", "--run ngram", "needs a mode"),
    ("bench drafters", "--run ngram chain:3 chain:3", "another drafter or mode"),
    ("bench drafters", "--batch 500", "fewer than one batch"),
    ("bench drafters", "--run /no/such/head chain:3", "no directory"),
    ("bench drafters", "--run none chain:3", "names another drafter"),
    ("bench engine", "--modes plain,chain", "not plain, chain:K"),
    (
        *("bench engine", "--modes chain:7,plain@2"),
        "mode 'chain:7': say which acceptance length, as in chain:4@3.2; mode 'plain@2': plain",
    ),
    ("bench engine", "--modes plain --draft-head dflash", "--draft-head would do nothing"),
    ("bench engine", "--modes plain --drafter-quantization fp8", "give a mode that drafts, such"),
    ("bench engine", "--modes chain:3+int8 --drafter-quantization fp8", "exclude each other"),
    (
        *("bench engine", "--draft-head lilicorr --modes chain:16@2,chain:3,16:4:9"),
        "mode 'chain:16@2': this block drafter writes 15 tokens at once, and the draft tree has a "
        "max_depth of 16: choose one of at most 15; mode '16:4:9@4': a draft tree of top_k 9 is "
        "wider than this drafter's choice among 8 candidates: choose a smaller top_k",
    ),
    (
        *("bench engine", "--context 4096 --new-tokens 8 --modes plain"),
        "--context 4096 needs 4106 positions with what is generated, and the model has 4096: give "
        "at most 4086",
    ),
    ("bench engine", "--kernels all", "the kernels are for Hopper GPUs"),
    ("bench engine", "--kernels tok_k", "no kernel is called 'tok_k'"),
    ("bench exchange", "--devices 3", "--devices must be some of 2, 4, 8, at most the 8 there are"),
    ("bench exchange", "--widths 500,9216 --devices 16", "got 16; --widths must be multiples of"),
    ("bench exchange", "--widths 500,9216", "got 500, 9216"),
    ("bench kernels", "--only 'no such case'", "no case contains 'no such case'"),
    ("bench kernels", "--only none --only nil", "no case contains 'none' or 'nil'"),
    ("bench serving", "--sp 3", "--page-size 8 cannot be split over 3 devices; it can over 1, 2, "),
    ("bench serving", "--sp 0", "parallel sizes must be >= 1"),
    ("bench serving", "--dp 0", "parallel sizes must be >= 1"),
    ("bench serving", "--dp 2 --bare", "--bare times one engine without a scheduler: leave out"),
    ("bench serving", "--dp 4 --tp 4", "needs 16 devices"),
    ("bench serving", "--spread 1", "--spread must be a share"),
    ("bench serving", "--shared-prefix -1", "--shared-prefix must be at least 0"),
    ("bench serving", "--drafter ngram", "--drafter is for models"),
    ("bench serving", "--drafter-bits 8 --drafter-quantization fp8", "exclude each other"),
    ("bench serving", "--compare fixed", "--compare fixed is for --adaptive"),
    ("bench serving", "--compare uncached --no-prefix-cache", "--compare uncached needs the pref"),
    ("bench serving", "--requests 2,8 --structured 3", "--structured must be at most 2"),
    slow("bench serving", "--tree chain:4", "say which acceptance length"),
    ("bench serving", "--lengths nothing.json", "nothing.json"),
    ("compile-ahead", "--mode chain", "not plain, chain:K"),
    ("compile-ahead", "--mode plain --draft-head dflash", "--draft-head would do nothing"),
    ("compile-ahead", "--tp 0", "must be at least 1"),
    ("compile-ahead", "--sp 0", "must be at least 1"),
    ("compile-ahead", "--sp 3", "--page-size 64 cannot be split over 3 devices; it can over 1, 2"),
    ("compile-ahead", "--sp 2 --tpu v6e:2x2", "for H100s only: leave out --tpu"),
    ("compile-ahead", "--wheels {empty}", "run: pip install --target {empty} --no-deps jax-cuda13"),
    ("compile-ahead", "--wheels {old}", "jax-cuda13-pjrt 0.1.2, but jaxlib is"),
    ("compile-ahead", "--wheels {good} --dump {good}", "is not empty"),
    ("compile-ahead", "--shape tiny --context 4096", "--context 4096 needs"),
    ("compile-ahead", "--chunk 64", "add --program prefill"),
    ("compile-ahead", "--tpu v6e:2x2 --libtpu {empty}", "lacks libtpu; run: pip install --target"),
    ("compile-ahead", "--tpu v6e:2x2 --libtpu {old}", "has libtpu 0.1.2, but this jax needs 0.0."),
    ("eval-drafter", "--modes chain", "not plain, chain:K or NODES:DEPTH:TOPK"),
    (
        *("eval-drafter", "--modes chain:1,tree:4:8:2,5:7:2"),
        "tree 'tree:4:8:2': num_nodes (4) must exceed max_depth (8): the root counts as a node; "
        "tree '5:7:2': num_nodes (5) must exceed",
    ),
    ("eval-drafter", "--prompts 0", "must be at least 1"),
    ("eval-drafter", "--drafter /no/such/head", "no directory"),
    ("eval-drafter", "--data /no/such/data", "no such file or folder"),
    ("profile-round", "--mode chain", "not plain, chain:K"),
    ("profile-round", "--mode plain --draft-head dspark", "--draft-head would do nothing"),
    ("profile-round", "--mode chain:8@2 --draft-head dspark", "mode 'chain:8@2': this block draft"),
    ("profile-round", "--rounds 1", "--rounds must be at least 2"),
    ("profile-round", "--sp 0", "parallel sizes must be >= 1"),
    ("profile-round", "--sp 3", "--page-size 16 cannot be split over 3 devices; it can over 1, 2"),
    ("profile-round", "--kernels all", "the kernels are for Hopper GPUs"),
    ("profile-prompt", "--mode plain --draft-head dspark", "--draft-head would do nothing"),
    ("profile-prompt", "--sp 3", "--page-size 16 cannot be split over 3 devices; it can over"),
    ("profile-round", "--plot /no/such/folder/plot.png", "no directory /no/such/folder"),
]


@pytest.mark.parametrize(("command", "words", "message"), CASES)
def test_bad_input_is_one_line_and_exit_code_2(
    command: str, words: str, message: str, folders: dict[str, Path], sources: Path, capsys
):
    names = {name: str(path) for name, path in folders.items()} | {"sources": str(sources)}
    arguments = f"{DEFAULTS.get(command, '')} {words}".format(**names)
    assert command_line.main([*command.split(), *shlex.split(arguments)]) == 2
    printed = capsys.readouterr().err
    last = printed.rstrip().splitlines()[-1]  # after what tells of progress
    assert last.startswith(f"jaxspec {command}: ") and message.format(**names) in last
    assert "Traceback" not in printed


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of compilers: of this version, of an old one, and none."""
    root = tmp_path_factory.mktemp("wheels")
    for folder, version in (("good", JAXLIB_VERSION), ("old", "0.1.2")):
        fake_wheels(root / folder, version)
    return {name: root / name for name in ("good", "old", "empty")}


def fake_wheels(folder: Path, version: str) -> Path:
    """A folder with the wheels' names and nothing else."""
    for name in (*WHEELS, "libtpu"):
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder
