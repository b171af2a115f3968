"""The command line: ``jaxspec COMMAND ...`` or ``python -m jaxspec COMMAND ...``."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import jaxspec
from jaxspec.commands.shared.importing import INTERRUPTED, MissingExtra, import_command

# What each command does. Its module has the same name, with underscores, in jaxspec/commands/.
COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "generate": "generate text speculatively, compare with plain decoding, or chat",
        "serve": "serve a model over HTTP, as OpenAI's API does",
        "train-drafter": "train a draft head for a model",
        "train-lm": "train a small language model from scratch",
        "quantize": "quantize a model or a draft head, by AWQ, GPTQ or rounding",
        "adapt-drafter": "adapt a draft head to a new domain while it serves",
        "eval-drafter": "measure how many draft tokens are accepted",
        "measure-perplexity": "compare how well models predict held-out text",
        "kv-scales": "measure scales for 8-bit keys and values, and what they cost in perplexity",
        "check-exactness": "compare the tokens of speculative and plain decoding",
        "check-deterministic": "compare the tokens of requests alone and in full batches",
        "bench adaptive": "compare adaptive speculation with fixed trees, at several loads",
        "bench collectives": "count what devices send to each other in each layer",
        "bench drafters": "time drafters against plain decoding, on real text",
        "bench engine": "time rounds of a public model shape, with random weights",
        "bench exchange": "time how devices that share a model sum their products",
        "bench http": "measure what HTTP costs beside the engine, at many streams",
        "bench kernels": "time every kernel and its jnp reference",
        "bench pipeline": "time one model on one device, by tensor parallelism and as pipelines",
        "bench prompts": "time how long prompts of a public model shape take to be read",
        "bench repair": "change weights while rollouts run: repair them, or restart them",
        "bench rollouts": "time rollouts of reinforcement learning, plain and speculative",
        "bench serving": "serve many requests as they arrive, and measure what clients see",
        "bench together": "compare many requests together with plain decoding, and one at a time",
        "compare-runs": "set the figures of benchmarks side by side, of any devices",
        "profile-round": "show where the time of one round goes",
        "profile-prompt": "show where the time of reading prompts goes",
        "compile-ahead": "compile the decode program for H100s or TPUs on a machine without them",
    }
)
# The former names of commands, which get an error that says the new one.
FORMER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "adapt": "adapt-drafter",
        "eval": "eval-drafter",
        "perplexity": "measure-perplexity",
        "profile": "profile-round",
        "train-head": "train-drafter",
    }
)


def make_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, text in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="jaxspec",
        usage="jaxspec COMMAND [options]",
        description="Lossless speculative decoding in JAX.",
        epilog="\n".join(["commands:", *lines, "", "`jaxspec COMMAND --help` lists its options."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jaxspec {jaxspec.__version__}")
    return parser


def run(name: str, arguments: Sequence[str]) -> int:
    """Import and run one command. Modules of other commands are not imported."""
    module = "jaxspec.commands." + name.replace(" ", ".").replace("-", "_")
    try:
        command = import_command(module, f"jaxspec {name}")
    except MissingExtra as error:
        print(f"jaxspec {name}: {error}", file=sys.stderr)
        return 2
    return command.main(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return dispatch(words)
    except KeyboardInterrupt:  # between the import of a command and its start
        print("jaxspec: interrupted", file=sys.stderr)
        return INTERRUPTED


def dispatch(words: Sequence[str]) -> int:
    for count in (1, 2):
        name = " ".join(words[:count])
        if name in COMMANDS:
            return run(name, words[count:])
    parser = make_parser()
    parser.parse_known_args(words)  # ends here for --help and --version
    if not words:
        parser.print_help(sys.stderr)
        return 2
    if words[0] in FORMER_NAMES:
        name = FORMER_NAMES[words[0]]
        parser.error(f"the command {words[0]!r} is now {name!r}: run `jaxspec {name}`")
    begun = [name for name in COMMANDS if name.startswith(f"{words[0]} ")]
    known = f"choose from {', '.join(begun)}" if begun else "`jaxspec --help` lists them"
    parser.error(f"no command {' '.join(words[:2])!r}: {known}")


if __name__ == "__main__":
    sys.exit(main())
