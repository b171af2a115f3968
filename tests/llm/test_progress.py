"""The progress bar of a batch."""

from jaxspec import SamplingParams
from jaxspec.engine.generation import Generation, RequestStatistics
from jaxspec.llm.progress_bar import speed


def generations() -> list[Generation]:
    statistics = RequestStatistics(rounds=4, drafted=8, accepted=[4, 3, 2])
    ended = Generation("0", (1,), SamplingParams(), statistics, [1] * 11, finish_reason="length")
    waiting = Generation("1", (1,), SamplingParams(), RequestStatistics(0, 0, [0] * 3))
    return [ended, waiting]


def test_speed_is_that_of_all_and_leaves_out_tokens_of_no_round():
    assert speed(generations(), 2.0) == "6 tokens/s, 2.50 tokens a round"
    assert speed(generations()[1:], 0.0) == "0 tokens/s"
