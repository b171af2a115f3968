"""Draw one round: the drafted tree, the path that was accepted, and the bonus token.

The built-in model and head by default. Some rounds are decoded first; the next one is drawn with
the tokens as labels.

    jaxspec plot-tree --out docs/tree.png
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from jaxspec import BUILT_IN_HEAD, LLM, EngineConfig, SamplingParams, SpeculationConfig
from jaxspec.commands.shared.shell import add_model_option, command_parser, run_command
from jaxspec.llm.tree_text import RoundTexts

PROMPT = "import json\n\n\ndef read_config(path):\n"
BLACK, GREEN, GREY, ORANGE = "#1f2328", "#1a7f37", "#8c959f", "#bc4c00"


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser("plot-tree", __doc__)
    add_model_option(parser)
    add = parser.add_argument
    add("--drafter", default=str(BUILT_IN_HEAD), help="as in jaxspec generate (default: the head)")
    add("--tree", default="tree:24:5:3", help="chain:K or tree:NODES:DEPTH:TOPK")
    add("--prompt", default=PROMPT, help="text to continue (default: a line of Python)")
    add("--skip", type=int, default=8, help="rounds to decode before the drawn one")
    add("--temperature", type=float, default=0.5, help="temperature of sampling")
    add("--seed", type=int, default=1, help="seed of sampling")
    add("--out", type=Path, default=Path("tree.png"), help="picture to write")
    return parser


def most_tokens(rounds: int, max_depth: int, max_position: int) -> int:
    """The most tokens of a text of so many rounds.

    Raises ValueError if a text of a model with ``max_position`` positions cannot be that long.
    """
    tokens = 1 + rounds * (max_depth + 1)
    if tokens >= max_position:
        raise ValueError(
            f"{rounds} rounds exceed the model's {max_position} positions: give a smaller --skip"
        )
    return tokens


def decode_round(llm: LLM, prompt: str, skip: int, temperature: float, seed: int) -> dict[str, Any]:
    """The round after ``skip`` others, as RoundTexts gives it, and in ``before`` the text so far.

    Raises ValueError if the text ends before that round, or cannot be that long.
    """
    rounds = skip + 1
    params = llm.params
    most = most_tokens(rounds, params.speculation.max_depth, params.target.config.max_position)
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=most, trees=True)
    [completion] = llm.generate([prompt], sampling)
    trees = completion.trees or []
    if len(trees) < rounds:
        raise ValueError(f"the text ends after {len(trees)} rounds: give a smaller --skip")
    decode = llm.tokenizer.decode
    told = RoundTexts(decode, completion.prompt_token_ids).add(trees[:rounds])
    committed = sum(tree.committed for tree in trees[:skip])
    tokens = [*completion.prompt_token_ids, *completion.token_ids[: 1 + committed]]
    return {**told[-1], "before": decode(tokens)}


def heights(parents: Sequence[int]) -> list[float]:
    """A height for each node: leaves one below the other, parents in the middle of their children.

    ``parents`` come before their children; the root's is -1.
    """
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    placed = [0.0] * len(parents)
    leaves = 0

    def place(node: int) -> float:
        nonlocal leaves
        if children[node]:
            centers = [place(child) for child in children[node]]
            placed[node] = (centers[0] + centers[-1]) / 2
        else:
            placed[node], leaves = float(leaves), leaves + 1
        return placed[node]

    place(0)
    return placed


def label(text: str) -> str:
    """A token's text with its spaces and line ends visible."""
    shown = text.replace("\n", "↵").replace("\t", "⇥")
    spaces = len(shown) - len(shown.lstrip(" "))
    shown = f"␣×{spaces}{shown[spaces:]}" if spaces > 2 else shown.replace(" ", "␣")
    return shown.replace("$", r"\$")  # no mathematics


def depths(parents: Sequence[int]) -> list[int]:
    """The depth of each node; parents come before their children, the root's is -1."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def draw(tree: Mapping[str, Any], out: Path) -> None:
    """Write the picture of a round, in the form of RoundTexts."""
    nodes, path, bonus = tree["nodes"], tree["path"], tree["bonus"]
    parents = [node["parent"] for node in nodes]
    rows, columns = heights(parents), depths(parents)
    figure = Figure(figsize=(9, 0.34 * max(rows) + 1.2), layout="constrained")
    axes = figure.subplots()

    def box(x: float, y: float, token: Mapping[str, Any], color: str, width: float, line="-"):
        look = {"boxstyle": "round,pad=0.3", "edgecolor": color, "facecolor": "white"}
        look |= {"linewidth": width, "linestyle": line}
        shown = label(token["text"]) or f"<{token['token']}>"
        font = {"color": color, "family": "monospace", "size": 9}
        axes.text(x, -y, shown, font, bbox=look, ha="center", va="center")

    box(0, rows[0], nodes[0], BLACK, 1.6)
    for index, node in enumerate(nodes[1:], 1):
        color, width = (GREEN, 2) if index in path else (GREY, 0.8)
        parent = node["parent"]
        ends = (columns[parent], columns[index]), (-rows[parent], -rows[index])
        axes.plot(*ends, color=color, lw=width, zorder=0)
        box(columns[index], rows[index], node, color, min(width, 1.6))
    last, depth = path[-1], len(path) - 1
    free = max(rows) + 1.0 if last in parents else rows[last]
    axes.plot((depth, depth + 1), (-rows[last], -free), color=ORANGE, lw=2, ls=":", zorder=0)
    box(depth + 1, free, bonus, ORANGE, 1.6, "--")
    axes.set_xlim(-0.4, max(*columns, depth + 1) + 0.4)
    axes.set_title(
        f"{len(nodes) - 1} drafted tokens, {depth} accepted (green), and the target's next token "
        "(orange)",
        fontsize=10,
    )
    axes.axis("off")
    figure.savefig(out, dpi=110)


def run(arguments: argparse.Namespace) -> None:
    speculation = SpeculationConfig.parse(arguments.tree)
    if speculation.is_plain or arguments.drafter == "none":
        raise ValueError("plain decoding drafts no tree: give chain:K or tree:NODES:DEPTH:TOPK")
    if arguments.skip < 0:
        raise ValueError(f"--skip must be at least 0, got {arguments.skip}")
    engine = EngineConfig(max_rows=1, trees=True)
    llm = LLM(arguments.model, arguments.drafter, speculation=speculation, engine=engine)
    options = arguments.skip, arguments.temperature, arguments.seed
    tree = decode_round(llm, arguments.prompt, *options)
    draw(tree, arguments.out)
    print(f"after {tree['before']!r}:")
    print(f"{len(tree['path']) - 1} of {len(tree['nodes']) - 1} drafted tokens accepted")
    print(f"drawn in {arguments.out}")


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(make_parser(), run, arguments)
