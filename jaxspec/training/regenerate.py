"""Self-distillation: the target writes the answers that a head is trained on."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.llm.llm import LLM
from jaxspec.training import fingerprint
from jaxspec.training.heads.data import Answer, Examples, answers_as_rows


def regenerate(
    llm: LLM,
    examples: Examples,
    path: Path,
    *,
    temperatures: tuple[float, ...] = (0.0, 1.0),
    deadline: float | None = None,
    report: Callable[[int, int], None] = lambda done, rows: None,
    read_only: bool = False,
) -> Examples:
    """Each row's prompt, continued by the target to the row's length; only the answer is learned.

    Row ``i`` uses temperature ``i`` modulo their number, and seed ``i``. Every finished batch is
    appended to ``path`` (JSONL); a later call continues after those.

    Args:
      deadline: time.monotonic() when to stop, perhaps with the first rows only. A batch is started
        only if it will end by then when it takes as long as the one before; one batch always runs.
        None: all rows.
      report: called after each batch with the rows done and the number of rows.
      read_only: take the answers that ``path`` has, and write nothing.

    Raises ValueError if ``path`` holds the answers of another model or to other rows; with
    ``read_only`` also if it has none.
    """
    length = examples.tokens.shape[1]
    rows = _restore(path, _described(llm, examples, temperatures), read_only=read_only)
    report(len(rows), len(examples))
    if read_only:
        if not rows:
            raise ValueError(f"no answers in {path}: name the --work of an earlier --regenerate")
        return answers_as_rows(rows, length)
    seconds = 0.0  # of the batch before
    while len(rows) < len(examples):
        started = time.monotonic()
        if rows and deadline is not None and started + seconds > deadline:
            break
        batch = range(len(rows), min(len(rows) + llm.engine.config.max_rows, len(examples)))
        answers = _answers(llm, examples, batch, temperatures)
        with path.open("a") as file:
            file.writelines(json.dumps(answer) + "\n" for answer in answers)
        rows += answers
        report(len(rows), len(examples))
        seconds = time.monotonic() - started
    return answers_as_rows(rows, length)


def _answers(
    llm: LLM, examples: Examples, batch: range, temperatures: tuple[float, ...]
) -> list[Answer]:
    """(prompt length, token ids of prompt and answer) for each of some rows."""
    prompts = [examples.prompt(row) for row in batch]
    sampling = [
        SamplingParams(
            temperature=temperatures[row % len(temperatures)],
            seed=row,
            max_tokens=examples.tokens.shape[1] - len(prompt),
            further_stop_token_ids=llm.turn_end(),
        )
        for row, prompt in zip(batch, prompts, strict=True)
    ]
    completions = llm.generate(prompts, sampling)
    return [(len(c.prompt_token_ids), c.prompt_token_ids + c.token_ids) for c in completions]


def _described(llm: LLM, examples: Examples, temperatures: tuple[float, ...]) -> dict[str, object]:
    content = {
        "target": fingerprint.of_weights(llm.params.target),
        "rows": fingerprint.of_rows(examples.tokens, examples.prompt_lens),
        "temperatures": temperatures,
    }
    return json.loads(json.dumps(content))


def _restore(path: Path, described: dict[str, object], *, read_only: bool) -> list[Answer]:
    """The answers of an interrupted call; an incomplete last line is dropped."""
    if read_only and not path.exists():
        return []
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(described) + "\n")
        return []
    text = path.read_text()
    complete = text[: text.rfind("\n") + 1]
    first, *lines = complete.splitlines() or ["null"]
    if json.loads(first) != described:
        remedy = (
            "give the same --data, --length, --dtype, --prompt-tokens, --regenerate-rows and "
            "--regenerate-temperatures"
            if read_only
            else "remove it"
        )
        raise ValueError(f"{path} holds the answers of another model or to other rows: {remedy}")
    if complete != text and not read_only:
        path.write_text(complete)
    return [(prompt, ids) for prompt, ids in map(json.loads, lines)]


def concatenate(first: Examples, second: Examples) -> Examples:
    """The rows of both."""
    return Examples(
        np.concatenate([first.tokens, second.tokens]),
        np.concatenate([first.learned, second.learned]),
        np.concatenate([first.prompt_lens, second.prompt_lens]),
    )
