"""Generate text by speculative decoding, and report the speed.

Without arguments, the built-in model continues a built-in prompt.
"""

# The options alone, so that --help and a slip of the pen do not wait for jax: the work is in
# generation.py.

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxspec.commands.shared.engine_options import (
    AUTO_DRAFTER_HELP,
    DTYPE_HELP,
    KERNELS_HELP,
    add_kv_options,
    add_mode_options,
    add_pipeline_options,
    add_process_options,
    add_program_options,
    add_sequence_parallel_option,
    add_tensor_parallel_option,
    add_tree_options,
    check_program_options,
)
from jaxspec.commands.shared.importing import import_command
from jaxspec.commands.shared.shell import add_model_option, command_parser, read_text, run_command

PAIRS = 10
BATCH_ROWS = 16  # of --out, unless told otherwise
PROMPT = '''import json


def read_config(path):
    """Read a JSON file and return its content as a dictionary."""
'''


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("generate", __doc__)
    add = parser.add_argument
    add_model_option(parser)
    add("--drafter", default="auto", help=AUTO_DRAFTER_HELP)
    add("--dtype", choices=("float32", "bfloat16"), help=DTYPE_HELP)
    add_kv_options(parser)
    add_tensor_parallel_option(parser)
    add_sequence_parallel_option(parser)
    add_pipeline_options(parser)
    add("--kernels", default="auto", help=KERNELS_HELP)
    add("--json", action="store_true", help="print one JSON object instead of text")
    add("--verbose", action="store_true", help="also print the tokens that end the text")
    add("--show-trees", type=Path, metavar="FILE", help="write an HTML page that shows the draft "
        "tree of every round and how each token came")  # fmt: skip
    add_prompt_options(parser)
    add_batch_options(parser)
    add_comparison_options(parser)
    add_tree_options(parser)
    add_sampling_options(parser)
    add_mode_options(parser)
    add_memory_options(parser)
    add_process_options(parser)
    return parser


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompt").add_mutually_exclusive_group()
    group.add_argument("--prompt", help="text to continue (default: a built-in one)")
    group.add_argument("--prompt-file", type=Path, metavar="FILE", help="file with the text to "
        "continue; with --out, prompts as JSON lines (default: none)")  # fmt: skip
    group.add_argument("--chat", action="store_true", help="chat on the terminal, through the "
        "model's chat template; /exit or Ctrl-D ends it")  # fmt: skip


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("file of prompts").add_argument
    add("--out", type=Path, metavar="FILE", help="write a line of JSON for each line of "
        "--prompt-file, in its order; a run that was cut off goes on when it is started again. "
        "Lines have prompt, messages or prompt_token_ids, and may have id and the sampling options "
        "of SamplingParams; or they are those of OpenAI's batches")  # fmt: skip
    add("--shard", metavar="I/N", help="do part I (from 0) of N, into FILE-0000I-of-0000N; slurm: "
        "the part of this task of an array job")  # fmt: skip
    add("--max-rows", type=int, metavar="N", help="requests that run together, in each engine "
        f"(default: {BATCH_ROWS})")  # fmt: skip
    add("--dp", type=int, metavar="N", help="engines side by side, each with the model on "
        "--tp x --sp devices of its own (default: 1)")  # fmt: skip
    add("--token-ids", action="store_true", help="results also have token ids")
    add("--chat-template", type=Path, metavar="FILE", help="Jinja template for lines with messages "
        "(default: the model's)")  # fmt: skip


def add_comparison_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("comparison").add_argument
    add("--compare", action="store_true", help="also decode plainly; report the speed-up and "
        "whether the tokens are identical")  # fmt: skip
    add("--pairs", type=int, metavar="N", help="alternating pairs of a plain and a speculative "
        f"run, after a warm-up; the medians are reported (default: {PAIRS})")  # fmt: skip


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add("--max-tokens", type=int, default=200, help="new tokens at most")
    add("--temperature", type=float, default=0.5, help="0 is greedy")
    add("--top-k", type=int, default=0, help="likeliest tokens kept; 0 keeps all")
    add("--top-p", type=float, default=0.9, help="probability kept; 1 keeps all")
    add("--min-p", type=float, default=0.0, help="least probability kept, as a share of the "
        "largest")  # fmt: skip
    add("--seed", type=int, default=1, help="the same seed gives the same text")


def add_memory_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory")
    group.add_argument("--page-size", type=int, default=16, help="tokens of a page of the KV cache")
    group.add_argument("--max-length", type=int, help="most tokens, prompt included (default: what "
        "the model allows, at most 2048)")  # fmt: skip
    group.add_argument("--num-pages", type=int, help="of the KV cache (default: as needed)")
    add_program_options(group)


def check(arguments: argparse.Namespace) -> None:
    """Raises ValueError for options that do not go together."""
    if arguments.pairs is not None and not arguments.compare:
        raise ValueError("--pairs would do nothing: add --compare")
    check_program_options(arguments)
    if arguments.chat and (arguments.compare or arguments.json):
        raise ValueError("--chat goes with neither --compare nor --json")
    if arguments.show_trees is not None and (arguments.chat or arguments.compare):
        raise ValueError("--show-trees goes with neither --chat nor --compare")
    if arguments.compare and arguments.coordinator is not None:
        raise ValueError("--compare needs two engines, and several processes share one")
    check_batch(arguments)


def check_batch(arguments: argparse.Namespace) -> None:
    """Raises ValueError for options that do not go together with or without --out."""
    if arguments.out is None:
        for name in ("shard", "max_rows", "dp", "token_ids", "chat_template"):
            if getattr(arguments, name) not in (None, False):
                raise ValueError(f"--{name.replace('_', '-')} is for files of prompts: add --out")
        if arguments.prompt_file is not None and arguments.prompt_file.suffix == ".jsonl":
            raise ValueError(f"{arguments.prompt_file} looks like a file of prompts: add --out")
        return
    if arguments.verbose:
        raise ValueError("--verbose would do nothing with --out: leave it out")
    if arguments.prompt_file is None:
        raise ValueError("--out needs --prompt-file, with one prompt a line")
    if arguments.compare or arguments.show_trees is not None:
        raise ValueError("--out goes with neither --compare nor --show-trees")


def read_prompt(arguments: argparse.Namespace) -> str:
    """The text to continue. Raises ValueError if there is none."""
    if arguments.prompt_file is None:
        text = PROMPT if arguments.prompt is None else arguments.prompt
    else:
        text = read_text(arguments.prompt_file)
    if not text:
        raise ValueError("the prompt is empty")
    return text


def run(arguments: argparse.Namespace) -> None:
    check(arguments)
    if arguments.out is not None:
        import_command("jaxspec.commands.generate.prompt_file", "jaxspec generate").run(arguments)
        return
    prompt = None if arguments.chat else read_prompt(arguments)
    generation = import_command("jaxspec.commands.generate.generation", "jaxspec generate")
    generation.run(arguments, prompt)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
