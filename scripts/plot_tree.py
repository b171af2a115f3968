"""Draw one round: the drafted tree, the path that was accepted, and the bonus token.

The built-in model and head by default. Some rounds are decoded first; the tree of the next one is
drafted, verified and accepted as `decode` does it, and drawn with the tokens as labels.

    python scripts/plot_tree.py --out docs/tree.png
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import jaxspec
from jaxspec import BUILT_IN_HEAD, BUILT_IN_MODEL, EngineParams, SpeculationConfig
from jaxspec.decoding.acceptance import Accepted
from jaxspec.decoding.round import accept, verify
from jaxspec.decoding.state import EngineState
from jaxspec.decoding.trees.tree import DraftTree
from jaxspec.llm.tokenizer import load_tokenizer

PROMPT = "import json\n\n\ndef read_config(path):\n"
BLACK, GREEN, GREY, ORANGE = "#1f2328", "#1a7f37", "#8c959f", "#bc4c00"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default=str(BUILT_IN_MODEL), help="model directory or hub id")
    add("--drafter", default=str(BUILT_IN_HEAD), help="as in generate.py (default: the head)")
    add("--tree", default="tree:24:5:3", help="chain:K or tree:NODES:DEPTH:TOPK (%(default)s)")
    add("--prompt", default=PROMPT, help="text to continue")
    add("--skip", type=int, default=8, help="rounds to decode before the one drawn (%(default)s)")
    add("--temperature", type=float, default=0.5, help="(%(default)s)")
    add("--seed", type=int, default=1, help="(%(default)s)")
    add("--out", type=Path, default=Path("tree.png"), help="picture to write (%(default)s)")
    return parser.parse_args(arguments)


@jax.jit
def run_round(params: EngineParams, state: EngineState) -> tuple[DraftTree, Accepted]:
    """What the next round of row 0 drafts and accepts; the state stays as it is."""
    options = params.round_options()
    tree, _ = params.drafter.propose(params.target, state, options)
    scores = verify(params.target, state, tree, options, params.drafter.capture)
    return tree, accept(tree, scores.logits, options, state, params.target)


def start(
    params: EngineParams, prompt: Sequence[int], skip: int, temperature: float, seed: int
) -> EngineState:
    """One row that has read ``prompt`` and decoded ``skip`` rounds.

    Raises ValueError if that is longer than the model allows.
    """
    length = len(prompt) + 2 + (skip + 1) * (params.speculation.max_depth + 1)
    if length > params.target.config.max_position:
        raise ValueError(
            f"{skip} rounds exceed the model's {params.target.config.max_position} "
            "positions: give a smaller --skip"
        )
    state = jaxspec.init_state(params, num_rows=1, max_length=length)
    sampling = jaxspec.make_sampling(1, temperature=temperature, seeds=seed)
    prompts = jnp.asarray([prompt], jnp.int32)
    state = jaxspec.admit(params, state, [0], prompts, [len(prompt)], sampling=sampling)
    prefill = jax.jit(jaxspec.prefill, static_argnames="width")
    state, _ = prefill(params, state, width=len(prompt))
    if skip > 0:
        state, _ = jax.jit(jaxspec.decode, static_argnums=2)(params, state, skip)
    return state


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
            own = [place(child) for child in children[node]]
            placed[node] = (own[0] + own[-1]) / 2
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


def draw(tree: DraftTree, accepted: Accepted, texts: dict[int, str], out: Path) -> None:
    """Write the picture of row 0. ``texts`` holds the text of every token in it."""
    count, depth = int(tree.num_nodes[0]), int(accepted.depth[0])
    tokens, parents = (np.asarray(x)[0, :count].tolist() for x in (tree.tokens, tree.parents))
    columns = np.asarray(tree.depth)[0, :count].tolist()
    path = np.asarray(accepted.path)[0, : depth + 1].tolist()
    rows = heights(parents)
    figure = Figure(figsize=(9, 0.34 * max(rows) + 1.2), layout="constrained")
    axes = figure.subplots()

    def box(x: float, y: float, token: int, color: str, width: float, line: str = "-") -> None:
        look = {"boxstyle": "round,pad=0.3", "edgecolor": color, "facecolor": "white"}
        look |= {"linewidth": width, "linestyle": line}
        shown = label(texts[token]) or f"<{token}>"
        font = {"color": color, "family": "monospace", "size": 9}
        axes.text(x, -y, shown, font, bbox=look, ha="center", va="center")

    for node in range(1, count):
        ends = (columns[parents[node]], columns[node]), (-rows[parents[node]], -rows[node])
        chosen = node in path
        axes.plot(*ends, color=GREEN if chosen else GREY, lw=2 if chosen else 0.8, zorder=0)
    box(0, rows[0], tokens[0], BLACK, 1.6)
    for node in range(1, count):
        chosen = node in path
        box(columns[node], rows[node], tokens[node], *((GREEN, 1.6) if chosen else (GREY, 0.8)))
    last = path[-1]
    free = max(rows) + 1.0 if last in parents else rows[last]
    axes.plot((depth, depth + 1), (-rows[last], -free), color=ORANGE, lw=2, ls=":", zorder=0)
    box(depth + 1, free, int(accepted.tokens[0, depth]), ORANGE, 1.6, "--")
    axes.set_xlim(-0.4, max(*columns, depth + 1) + 0.4)
    axes.set_title(
        f"{count - 1} drafted tokens, {depth} accepted (green), and the target's own next token "
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
    params = jaxspec.load(arguments.model, arguments.drafter, speculation=speculation)
    tokenizer = load_tokenizer(arguments.model)
    prompt = tokenizer.encode(arguments.prompt)
    state = start(params, prompt, arguments.skip, arguments.temperature, arguments.seed)
    tree, accepted = run_round(params, state)
    used = {*np.asarray(tree.tokens).flat, *np.asarray(accepted.tokens).flat}
    texts = {int(token): str(tokenizer.decode([int(token)])) for token in used}
    draw(tree, accepted, texts, arguments.out)
    length = int(state.rows.context_lens[0]) + 1
    print(f"after {tokenizer.decode(np.asarray(state.rows.tokens)[0, :length].tolist())!r}:")
    print(f"{int(accepted.depth[0])} of {int(tree.num_nodes[0]) - 1} drafted tokens accepted")
    print(f"drawn in {arguments.out}")


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        run(parse_arguments(arguments))
    except ValueError as error:
        print(f"plot_tree.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
