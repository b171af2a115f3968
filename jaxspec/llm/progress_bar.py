"""A progress bar for a batch of requests."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from jaxspec.engine.generation import Generation


@contextmanager
def request_bar(
    total: int, console: Console | None = None, *, done: int = 0
) -> Iterator[Callable[[int, Callable[[float], str]], None]]:
    """A bar of the requests that have ended, ``done`` before now, on stderr.

    The function that it gives brings it up to date: with how many have ended, and a function from
    the seconds so far to a text beside the bar.
    """
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}")
    times = TimeElapsedColumn(), TimeRemainingColumn()
    console = Console(stderr=True) if console is None else console
    with Progress(*columns, *times, console=console) as progress:
        task = progress.add_task("", total=total, completed=done, speed="")

        def update(ended: int, speed: Callable[[float], str]) -> None:
            seconds = progress.tasks[task].elapsed or 0.0
            progress.update(task, completed=ended, speed=speed(seconds))

        yield update


@contextmanager
def progress_bar(generations: Sequence[Generation]) -> Iterator[Callable[[], None]]:
    """A bar of the requests that have ended, with tokens/s and acceptance, on stderr.

    The function that it gives brings it up to date.
    """
    with request_bar(len(generations)) as show:

        def update() -> None:
            ended = sum(generation.done for generation in generations)
            show(ended, lambda seconds: speed(generations, seconds))

        yield update
        update()


def speed(generations: Sequence[Generation], seconds: float) -> str:
    """Tokens/s of all, and how many tokens their rounds committed on average."""
    tokens = sum(len(generation.token_ids) for generation in generations)
    rounds = sum(generation.statistics.rounds for generation in generations)
    started = sum(bool(generation.token_ids) for generation in generations)
    return speed_text(tokens, tokens - started, rounds, seconds)


def speed_text(tokens: int, of_rounds: int, rounds: int, seconds: float) -> str:
    """Tokens/s, and tokens a round.

    Args:
      of_rounds: tokens that rounds committed; the first token of a request comes from reading its
        prompt.
    """
    text = f"{tokens / seconds if seconds else 0:,.0f} tokens/s"
    return f"{text}, {of_rounds / rounds:.2f} tokens a round" if rounds else text
