"""A progress bar for a batch of requests."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxspec.generation import Generation


@contextmanager
def progress_bar(
    generations: Sequence[Generation], console: Console | None = None
) -> Iterator[Callable[[], None]]:
    """A bar of the requests that have ended, with tokens/s and acceptance, on stderr.

    The function that it gives brings it up to date.
    """
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}")
    console = Console(stderr=True) if console is None else console
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=len(generations), speed="")

        def update() -> None:
            seconds = progress.tasks[task].elapsed or 0.0
            ended = sum(generation.done for generation in generations)
            progress.update(task, completed=ended, speed=speed(generations, seconds))

        yield update
        update()


def speed(generations: Sequence[Generation], seconds: float) -> str:
    """Tokens/s of all, and how many tokens their rounds committed on average."""
    tokens = sum(len(generation.token_ids) for generation in generations)
    rounds = sum(generation.statistics.rounds for generation in generations)
    text = f"{tokens / seconds if seconds else 0:,.0f} tokens/s"
    if rounds:  # the first token of each request comes from reading its prompt
        started = sum(bool(generation.token_ids) for generation in generations)
        text += f", {(tokens - started) / rounds:.2f} tokens a round"
    return text
