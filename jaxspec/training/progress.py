"""Progress of training, as a terminal shows it."""

import time
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxspec.training.draft_run import DraftRecord
from jaxspec.training.pretrain import Record


def progress_bar(console: Console) -> Progress:
    """A bar between a description and the time elapsed and left."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    return Progress(*columns, TimeRemainingColumn(), console=console)


def counting(progress: Progress, what: str) -> Callable[[int, int], None]:
    """A callback that shows how many there are done, and in all."""
    task = progress.add_task(what, total=None)

    def show(done: int, rows: int) -> None:
        progress.update(task, description=f"{what} {done}/{rows}", completed=done, total=rows)

    return show


def follow[R: (Record, DraftRecord)](
    records: Iterable[R], describe: Callable[[R], str], console: Console, started: float
) -> Iterator[R]:
    """The records of a run, each shown beside a bar; those with an evaluation stay as lines.

    Args:
      describe: a record in a line.
      started: time.monotonic() that the lines count from.
    """
    with progress_bar(console) as progress:
        task = progress.add_task("compiling", total=None)
        for record in records:
            line = describe(record)
            progress.update(task, description=line, total=record.total_steps, completed=record.step)
            if record.held_out_loss is not None:
                console.print(f"{time.monotonic() - started:6.1f} s  {line}")
            yield record
