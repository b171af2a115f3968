"""Prompts of chats, made from the Python packages that are installed here: code to explain, to test
and to rewrite, texts to summarize, and questions on everyday subjects.

A draft head learns from the answers that its target writes to such prompts (docs/training.md):

    python3 examples/chat_prompts.py prompts.jsonl --count 24000
    python3 scripts/train_drafter.py --model smollm2 --data prompts.jsonl --regenerate ...

``--kind`` keeps one kind of prompts, to measure acceptance on it, and ``--without`` leaves out
those that a head was trained on:

    python3 examples/chat_prompts.py code.jsonl --count 300 --kind code --without prompts.jsonl
"""

import argparse
import ast
import json
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

CODE = [
    "Explain what this Python function does:\n\n{}",
    "Write a docstring for this function:\n\n{}",
    "Are there bugs in this code? Suggest an improved version.\n\n{}",
    "Write a unit test for this code:\n\n{}",
    "Rewrite this code with type hints and clearer names:\n\n{}",
]
NAMES = [
    "Write a Python function named `{}` and explain how it works.",
    "What could a function called `{}` do? Give an example of its use.",
]
TEXTS = [
    "Summarize the following text in two sentences:\n\n{}",
    "Rewrite this text more simply:\n\n{}",
    "List the key points of this text:\n\n{}",
    "Turn this text into questions and answers:\n\n{}",
]
CHATS = [
    "What is {}?",
    "Explain {} to a child of ten.",
    "Give me five facts about {}.",
    "Write a short story about {}.",
    "What are the advantages and disadvantages of {}?",
    "How does {} work?",
    "Write a friendly email to a colleague about {}.",
    "Make a plan to learn about {} in one week.",
    "Write a poem about {}.",
    "What is the difference between {} and {}?",
    "What do {} and {} have in common?",
    "Write a dialogue between two friends on {} and {}.",
]
SUBJECTS = """
photosynthesis|the moon|bread baking|democracy|black holes|the French Revolution|bicycles|chess|
coffee|volcanoes|solar energy|the human heart|machine learning|inflation|jazz music|gardening|
the Roman Empire|whales|public transport|vaccines|the internet|poetry|mountain climbing|honey bees|
earthquakes|the stock market|yoga|dinosaurs|electric cars|sleep|rivers|the Renaissance|robots|
friendship|plastic waste|painting|gravity|football|the ocean|cooking pasta|magnets|history books|
rainbows|climate change|bridges|libraries|trees|time management|deserts|the piano|remote work|cats|
the water cycle|wind turbines|tea|cryptography|theatre|the immune system|trains|recycling|swimming|
databases|the solar system|museums|running a small shop|storms|photography|ancient Egypt|algebra|
a healthy breakfast|camping|the periodic table|languages|operating systems|penguins|city parks|
probability|knitting|airplanes|the printing press|rice farming|insects|job interviews|satellites|
compilers|birds of prey|first aid|glaciers|public speaking|the violin|batteries|forests|budgeting|
islands|evolution|the telephone|noise in cities|cheese|sorting algorithms|lighthouses|school lunches
""".replace("\n", "").split("|")


def code_and_texts(file: Path, rng: random.Random) -> Iterator[tuple[str, str]]:
    """(kind, prompt) for the functions and classes of a Python file."""
    try:
        source = file.read_text(encoding="utf-8")
        tree, lines = ast.parse(source), source.splitlines(keepends=True)
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        code = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])).strip()
        text = ast.get_docstring(node) or ""
        if 120 < len(code) < 900:
            yield "code", rng.choice(CODE).format(f"```python\n{code}\n```")
        if 150 < len(text) < 900:
            yield "summary", rng.choice(TEXTS).format(text)
        if rng.random() < 0.1 and not node.name.startswith("_"):
            yield "code", rng.choice(NAMES).format(node.name)


def from_packages(folder: Path, count: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """At least ``count`` (kind, prompt) of Python files below a folder, if it has as many."""
    files = [
        path for path in sorted(folder.rglob("*.py")) if "test" not in str(path.relative_to(folder))
    ]
    rng.shuffle(files)
    found = 0
    for file in files:
        pairs = list(code_and_texts(file, rng))
        yield from pairs
        found += len(pairs)
        if found >= count:
            return


def chats(rng: random.Random) -> list[tuple[str, str]]:
    """(kind, prompt) of every template with every subject."""
    return [
        ("chat", template.format(subject, rng.choice(SUBJECTS)))
        for template in CHATS
        for subject in SUBJECTS
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Prompts of chats, as JSON lines.")
    parser.add_argument("out", type=Path, help="file to write, one chat a line")
    parser.add_argument("--count", type=int, default=12_000, help="prompts (default: 12000)")
    parser.add_argument("--kind", choices=["chat", "code", "summary"], help="only this kind")
    parser.add_argument("--without", type=Path, help="leave out the prompts of this file")
    parser.add_argument("--folder", type=Path, default=Path(sysconfig.get_path("purelib")))
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore", SyntaxWarning)  # of the packages
    rng = random.Random(0)
    found = chats(rng) + list(from_packages(args.folder, 4 * args.count, rng))
    prompts = sorted({(prompt, kind) for kind, prompt in found if args.kind in (None, kind)})
    rng.shuffle(prompts)
    if args.without is not None:
        lines = map(json.loads, args.without.read_text(encoding="utf-8").splitlines())
        seen = {line["messages"][0]["content"] for line in lines}
        prompts = [(prompt, kind) for prompt, kind in prompts if prompt not in seen]
    with args.out.open("w", encoding="utf-8") as file:
        for prompt, kind in prompts[: args.count]:
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "-"}]
            file.write(json.dumps({"messages": turns, "kind": kind}) + "\n")
    print(f"{min(args.count, len(prompts))} of {len(prompts)} prompts written to {args.out}")


if __name__ == "__main__":
    main()
