"""Which program reads prompts where more may be compiled: a ready one, unless it takes too long."""

from collections.abc import Sequence

import pytest

from jaxspec.engine.programs.sizes import Kind, ReadKey, choose_reading


def key(rows: int, width: int) -> ReadKey:
    return ReadKey(rows, 8, width, Kind.GREEDY)


def compiled(wanted: Sequence[ReadKey]) -> list[ReadKey]:
    """What an engine compiles that is asked for these in turn."""
    ready: dict[ReadKey, None] = {}
    for one in wanted:
        ready[choose_reading(ready, one, one, sealed=False)] = None
    return list(ready)


@pytest.mark.parametrize(
    ("wanted", "again"),
    [
        (key(8, 512), True),  # four times as long in the program for 32 rows
        (key(16, 512), False),
        (key(32, 512), False),
        (key(32, 64), True),
        (key(32, 256), False),
    ],
)
def test_after_a_burst_fewer_rows_get_a_program_that_fits_them(wanted: ReadKey, again: bool):
    burst = key(32, 512)
    assert compiled([burst, wanted]) == ([burst, wanted] if again else [burst])


def test_few_tokens_take_as_long_as_the_weights_so_they_need_no_program_of_their_own():
    assert compiled([key(16, 16), key(1, 16), key(4, 16)]) == [key(16, 16)]
    assert compiled([key(1, 512), key(1, 128), key(1, 256)]) == [key(1, 512)]


def test_one_row_at_a_time_needs_few_programs():
    widths = (16, 512, 64, 128, 32, 256)
    assert compiled([key(1, width) for width in widths]) == [key(1, 16), key(1, 512), key(1, 64)]


def test_the_fastest_of_the_ready_ones_is_taken():
    ready = [key(32, 512), key(16, 512), key(16, 1024)]
    assert choose_reading(ready, key(8, 512), key(8, 512), sealed=False) == key(16, 512)
