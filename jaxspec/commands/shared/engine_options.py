"""Options of the engine that several commands have. Imports no jax; see engine_config.py."""

import argparse
from pathlib import Path

from jaxspec.commands.shared.option_types import numbers, tensor_parallel, whole_numbers
from jaxspec.config.quantization import SCHEMES

PREEMPTION = ("auto", "recompute", "swap")
SWAP_MEMORY = SNAPSHOT_MEMORY = 4.0  # GiB, as EngineConfig has it
# The help of options that commands have with defaults of their own.
DRAFTER_HELP = (
    "none, ngram, suffix, mtp (the model's own layers for multi-token prediction; mtp:1: the first "
    "alone; mtp:before, mtp:after, mtp:before-after, mtp:after-before: the hidden states that they "
    "read, in place of the family's), directory or hub id of an EAGLE or P-EAGLE head, of MTP "
    "layers, of a block head (DFlash, DFlash 2, DSpark, LiLiCorr, Domino, XPress) or of a draft "
    "model, or ngram+ or suffix+ and one of these but the first three: lookup's draft where it "
    "finds a long match, else the other's; suffix:N and suffix:N+ look up the last N tokens of "
    "past outputs, too, 65536 for example: others can tell from the speed what was written before; "
    "text: and a model with any tokenizer, or "
    "http://127.0.0.1:PORT of a server with OpenAI's API"
)
AUTO_DRAFTER_HELP = (
    f"{DRAFTER_HELP} (default: ngram+ the head that comes with jaxspec for the built-in model and "
    "for smollm2, mtp where there are such layers, else ngram)"
)
DTYPE_HELP = "dtype of weights and cache (default: float32 on CPU, else bfloat16)"
KERNELS_HELP = (
    "operations that run as kernels of jaxspec: auto (all on a Hopper GPU, attention on a TPU v5e "
    "or v6e, else none), all, none, or names such as paged_attention,top_k"
)


def add_tensor_parallel_option(parser: argparse.ArgumentParser) -> None:
    """``tp``: a number, or a grid (x, y); see parallel.TensorParallel."""
    parser.add_argument("--tp", type=tensor_parallel, default=1, metavar="N|XxY",
        help="devices that share the model (tensor parallel): N, or a grid of X x Y, in which X "
        "share hidden states, too (when that pays: docs/parallel.md)")  # fmt: skip


def add_sequence_parallel_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sp", type=int, default=1, metavar="N", help="devices that share each "
        "sequence, its KV cache and the reading of its prompt (sequence parallel); each has the "
        "model, or with --tp its part of it; N must divide the page size")  # fmt: skip


def add_quantization_options(parser: argparse.ArgumentParser) -> None:
    """``quantization``, ``lm_head_quantization`` and ``drafter_quantization`` of random weights."""
    add_target_quantization_options(parser)
    add_drafter_quantization_option(parser)


def add_target_quantization_options(parser: argparse.ArgumentParser) -> None:
    """``quantization`` and ``lm_head_quantization`` of random weights."""
    add = parser.add_argument
    add("--quantization", choices=SCHEMES, help="the target's matrices, but for its LM head")
    add("--lm-head-quantization", choices=SCHEMES, help="the target's LM head")


def add_drafter_quantization_option(parser: argparse.ArgumentParser) -> None:
    """``drafter_quantization`` of random weights."""
    parser.add_argument("--drafter-quantization", choices=SCHEMES, help="the head's matrices, LM "
        "head included")  # fmt: skip


def add_program_options(group: argparse._ActionsContainer) -> None:
    """Where compiled programs are kept; see program_cache.program_folder."""
    group.add_argument("--compilation-cache", type=Path, metavar="FOLDER", help="folder of "
        "compiled programs, for faster later starts (default: $JAX_COMPILATION_CACHE_DIR, else "
        "$XDG_CACHE_HOME/jaxspec/compilation, else ~/.cache/jaxspec/compilation)")  # fmt: skip
    group.add_argument("--no-compilation-cache", action="store_true", help="store no programs")


def check_program_options(arguments: argparse.Namespace) -> None:
    """Raises ValueError for options that do not go together."""
    if arguments.no_compilation_cache and arguments.compilation_cache is not None:
        raise ValueError("--no-compilation-cache goes without --compilation-cache")


def add_pipeline_options(parser: argparse.ArgumentParser) -> None:
    """``pp``, ``stage_layers`` and ``drafter_devices``; see shared.meshes."""
    add = parser.add_argument_group("pipeline").add_argument
    add("--pp", type=int, default=1, metavar="N", help="stages (pipeline parallel), each with some "
        "of the layers on devices of its own; with --tp N each stage has N devices")  # fmt: skip
    add("--stage-layers", type=numbers, metavar="L,L,..", help="layers of each stage "
        "(default: so many that all stages take about as long)")  # fmt: skip
    add("--drafter-devices", type=int, default=0, metavar="N", help="draft on N devices of their "
        "own, for one group of requests while another is verified")  # fmt: skip


def add_mode_options(parser: argparse.ArgumentParser) -> None:
    """How requests are served, be it one or many."""
    add = parser.add_argument_group("engine").add_argument
    add("--deterministic", action="store_true", help="in bfloat16, too, the text depends on "
        "nothing but the request; it costs time")  # fmt: skip
    add("--adaptive", action=argparse.BooleanOptionalAction, help="choose the tree of each call, "
        "or none, by what a round costs and what is accepted; --tree is the largest (default: "
        "without --tree, where the text depends on no tree)")  # fmt: skip
    add("--no-prefix-cache", action="store_true", help="keep no pages of the KV cache for later "
        "prompts that begin alike")  # fmt: skip


def add_tree_options(parser: argparse.ArgumentParser) -> None:
    """How tokens are drafted and accepted; see engine_config.speculation_config."""
    group = parser.add_argument_group("speculation")
    group.add_argument("--tree", metavar="SHAPE", help="shape of the draft tree: NODES:DEPTH:TOPK "
        "(the root is a node; TOPK children of a node), or chain:K (default: chain:7; on a CPU "
        "chain:3, for the built-in model with its default drafter chain:9)")  # fmt: skip
    group.add_argument("--acceptance", choices=("match", "rejection"), default="match",
        help="acceptance rule: match keeps the text of plain decoding, rejection its "
        "distribution")  # fmt: skip
    group.add_argument("--proposal", choices=("top_k", "coupled", "sampled"), help="how draft "
        "tokens are chosen: the drafter's likeliest (top_k), its likeliest under the noise that "
        "draws the target's (coupled), or drawn from its distribution (sampled) (default: the best "
        "that the rule allows: match coupled; rejection sampled, in trees top_k)")  # fmt: skip
    group.add_argument("--verify-width", type=int, metavar="N", help="nodes that every "
        "verification is padded to, plain decoding's too, so that all round alike (default: not "
        "padded)")  # fmt: skip
    group.add_argument(
        "--shard-drafter", action="store_true", help="with --tp, split the drafter, too"
    )
    add_drafter_bits(group)


def add_drafter_bits(group: argparse._ActionsContainer) -> None:
    """The option --drafter-bits, see checkpoints.load."""
    group.add_argument("--drafter-bits", type=int, choices=(4, 8), help="the drafter's matrices as "
        "integers of so many bits, of which fewer bytes are read; the text stays the same "
        "(default: as loaded)")  # fmt: skip


def add_kv_dtype(parser: argparse._ActionsContainer) -> None:
    """The option --kv-dtype, see checkpoints.load."""
    parser.add_argument("--kv-dtype", choices=("fp8",), help="fp8: keys and values as 8-bit floats "
        "(e4m3), which halves the cache; the text may differ a little (default: the dtype of the "
        "weights)")  # fmt: skip


def add_kv_options(parser: argparse._ActionsContainer) -> None:
    """``kv_dtype`` and ``kv_scales``."""
    add_kv_dtype(parser)
    parser.add_argument("--kv-scales", type=Path, metavar="FILE", help="with --kv-dtype fp8, "
        "scales of keys and values, from jaxspec kv-scales (default: 1)")  # fmt: skip


def add_process_options(parser: argparse.ArgumentParser) -> None:
    """Several processes that share a model; see processes_of."""
    add = parser.add_argument_group("several processes").add_argument
    add("--coordinator", metavar="HOST:PORT", help="share the model with other processes, of this "
        "or other hosts, which run the same command; HOST is where number 0 runs "
        "(docs/parallel.md)")  # fmt: skip
    add("--num-processes", type=int, metavar="N", help="how many there are (default: "
        "$SLURM_NTASKS)")  # fmt: skip
    add("--process-id", type=int, metavar="I", help="the number of this one, from 0 (default: "
        "$SLURM_PROCID)")  # fmt: skip
    add("--local-devices", type=whole_numbers, metavar="I,J", help="numbers of the GPUs that this "
        "process takes (default: all that it sees)")  # fmt: skip


def add_memory_options(parser: argparse.ArgumentParser) -> None:
    """What happens when many requests need more pages than there are."""
    add = parser.add_argument_group("few pages").add_argument
    add("--num-pages", "--pages", type=int, metavar="N", help="pages of the KV cache (default: as "
        "the rows need, or as fit)")  # fmt: skip
    add("--preemption", choices=PREEMPTION, default="auto", help="with too few pages, recompute "
        "some requests later, swap their pages to host memory, or (auto) do what was measured to "
        "be cheaper")  # fmt: skip
    add("--swap-memory", type=float, default=SWAP_MEMORY, metavar="GIB", help="host memory for "
        "swapped requests, in GiB; those that do not fit are recomputed, with --deterministic "
        "requests wait instead")  # fmt: skip
    add("--snapshot-memory", type=float, default=SNAPSHOT_MEMORY, metavar="GIB",
        help="host memory for the prefix cache of models with recurrent layers: snapshots of their "
        "states, in GiB")  # fmt: skip
