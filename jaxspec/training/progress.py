"""Progress of training, as a terminal shows it."""

import math
import time
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxspec.training.run import Record

QUIET_SECONDS = 10  # most time between two lines where the output is not a terminal


def progress_bar(console: Console) -> Progress:
    """A bar between a description and the time elapsed and left."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    return Progress(*columns, TimeRemainingColumn(), console=console)


def counting(progress: Progress, what: str) -> Callable[[int, int], None]:
    """A callback, called with the number done and the total, that shows both."""
    task, printed = progress.add_task(what, total=None), -math.inf

    def show(done: int, rows: int) -> None:
        nonlocal printed
        line = f"{what} {done}/{rows}"
        progress.update(task, description=line, completed=done, total=rows)
        if not progress.console.is_terminal and time.monotonic() - printed >= QUIET_SECONDS:
            printed = time.monotonic()
            progress.console.print(line)

    return show


def follow[R: Record](
    run: Callable[[Callable[[str], None]], Iterable[R]],
    describe: Callable[[R], str],
    console: Console,
    started: float,
) -> Iterator[R]:
    """Yields the records of a run, and shows each beside a progress bar.

    Records with an evaluation are also printed as lines. Where the output is not a terminal, there
    is no bar: notes, and a record every few seconds, are printed as lines too.

    Args:
      run: ``run`` of a Pretraining or DraftTraining.
      describe: formats a record as one line.
      started: time.monotonic() at the start; lines begin with the seconds since then.
    """
    with progress_bar(console) as progress:
        task = progress.add_task("starting", total=None)
        printed = time.monotonic()

        def show(line: str) -> None:
            nonlocal printed
            printed = time.monotonic()
            console.print(f"{printed - started:6.1f} s  {line}")

        def note(text: str) -> None:
            progress.update(task, description=text)
            if not console.is_terminal:
                show(text)

        for record in run(note):
            line = describe(record)
            progress.update(task, description=line, total=record.total_steps, completed=record.step)
            quiet = time.monotonic() - printed
            if record.held_out_loss is not None or (
                not console.is_terminal and quiet >= QUIET_SECONDS
            ):
                show(line)
            yield record
