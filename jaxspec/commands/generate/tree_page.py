"""The page of `generate --show-trees`: the rounds of one text, in one file with all it needs."""

import json
from collections.abc import Callable
from pathlib import Path

from jaxspec import Completion
from jaxspec.llm.tree_text import RoundTexts

PAGE = Path(__file__).parents[2] / "serving" / "page"  # the server's page draws with the same code


def check_page_path(path: Path) -> None:
    """Raises ValueError if no file can be written there."""
    if path.is_dir() or not path.parent.is_dir():
        reason = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ValueError(f"cannot write {path}: {reason}")


def tree_page(completion: Completion, decode: Callable[[list[int]], str], about: str) -> str:
    """HTML that shows a completion's text and ``trees``; ``about`` is a line of text above."""
    prompt = completion.prompt_token_ids
    speculation = {
        "rounds": completion.num_rounds,
        "drafted": completion.num_drafted,
        "accepted_by_depth": completion.acceptance_by_depth,
        "acceptance_length": completion.acceptance_length,
        "trees": RoundTexts(decode, prompt).add(completion.trees or ()),
    }
    data = {
        "about": about,
        "prompt": decode(prompt),
        "text": completion.text,
        "ending": completion.finish_reason,
        "speculation": speculation,
    }
    page = (PAGE / "report.html").read_text(encoding="utf-8")
    for mark, name in (("STYLE", "style.css"), ("TREE", "tree.js"), ("REPORT", "report.js")):
        page = page.replace(f"/* {mark} */", (PAGE / name).read_text(encoding="utf-8"))
    # The data come last, so no mark in them is replaced; and no "<" of theirs can end the script.
    return page.replace("/* DATA */", json.dumps(data).replace("<", "\\u003c"))
