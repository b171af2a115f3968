"""Which program reads prompts where more may be compiled: a ready one, unless it takes too long."""

from collections.abc import Sequence

import pytest

from jaxspec.engine.programs.sizes import Kind, ReadKey, Sizes, choose_reading, groups_of_reads


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


def test_two_rows_are_read_one_by_one_and_more_by_a_program_of_their_own():
    assert compiled([key(1, 64), key(2, 64), key(4, 64)]) == [key(1, 64), key(4, 64)]


def test_the_fastest_of_the_ready_ones_is_taken():
    ready = [key(32, 512), key(16, 512), key(16, 1024)]
    assert choose_reading(ready, key(8, 512), key(8, 512), sealed=False) == key(16, 512)


@pytest.mark.parametrize(
    ("read_call", "widths"),
    [
        (0, [16, 64, 512]),
        (96, [64, 512]),  # 4 rows of 64, instead of 2 of 16 and 2 of 64
        (4000, [512]),
    ],
)
def test_short_prompts_are_read_with_longer_ones_where_a_call_takes_longer(
    read_call: int, widths: list[int]
):
    sizes = Sizes(
        num_rows=8, shards=1, max_length=1024, page_size=16, num_pages=520, max_stops=4,
        scratch_slots=0, max_chunk=512, max_rounds=8, read_call=read_call,
    )  # fmt: skip
    reads = [(row, tokens, 1024) for row, tokens in enumerate((300, 60, 10, 33, 16))]
    groups = groups_of_reads(reads, sizes, masked=set())
    assert [width for (width, _), _ in groups] == widths
    assert sorted(read for _, group in groups for read in group) == reads
    groups = groups_of_reads(reads, sizes, masked={2})
    assert [group for (_, masked), group in groups if masked] == [[reads[2]]]
