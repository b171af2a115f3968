"""Data of three small tasks for lm-evaluation-harness, from docstrings of Python's own library.
Nothing is downloaded.

    python3 examples/lm_eval/make_data.py lm_eval_data

writes ``choice.jsonl`` (which of four sentences describes a function?), ``last_word.jsonl`` (how
does a sentence end?) and ``copy.jsonl`` (write a sentence again).
"""

import argparse
import ast
import json
import random
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

WORDS = range(7, 15)  # of a sentence


def sentences(folder: Path) -> Iterator[tuple[str, str]]:
    """(function, first sentence of its docstring) of the modules right in a folder."""
    for file in sorted(folder.glob("[a-z]*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            sentence = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            words = sentence.rstrip(".").split()
            plain = sentence.isascii() and sentence.count(".") == 1 and sentence.endswith(".")
            if plain and len(words) in WORDS and words[-1].isalpha():
                yield f"{file.stem}.{node.name}", sentence


def choices(found: Sequence[tuple[str, str]], rng: random.Random) -> Iterator[Mapping[str, object]]:
    for name, sentence in found:
        others = [other for _, other in found if other != sentence]
        shown = [sentence, *rng.sample(others, 3)]
        rng.shuffle(shown)
        yield {"name": name, "choices": shown, "answer": shown.index(sentence)}


def last_words(found: Sequence[tuple[str, str]]) -> Iterator[Mapping[str, object]]:
    for name, sentence in found:
        before, word = sentence.rstrip(".").rsplit(" ", 1)
        yield {"name": name, "before": before, "word": word}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Data of small tasks for lm-evaluation-harness.")
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--count", type=int, default=60, help="items of a task (default: 60)")
    parser.add_argument("--folder", type=Path, default=Path(sysconfig.get_path("stdlib")))
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore", SyntaxWarning)  # of the library
    rng = random.Random(0)
    found = sorted({sentence: name for name, sentence in sentences(args.folder)}.items())
    pairs = [(name, sentence) for sentence, name in rng.sample(found, min(args.count, len(found)))]
    tasks = {
        "choice": choices(pairs, rng),
        "last_word": last_words(pairs),
        "copy": ({"sentence": sentence} for _, sentence in pairs),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for task, items in tasks.items():
        lines = [json.dumps(item) + "\n" for item in items]
        (args.out / f"{task}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{len(pairs)} of {len(found)} sentences in each of {len(tasks)} files of {args.out}")


if __name__ == "__main__":
    main()
