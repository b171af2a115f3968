"""Stop strings: the text ends before the first of them, however it comes in pieces."""

from hypothesis import given
from hypothesis import strategies as st

from jaxspec.llm.tokenizer.detokenizer import StopStrings

text = st.text("ab", max_size=24)


def cut(whole: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first."""
    for end in range(len(whole) + 1):
        starts = [end - len(stop) for stop in stops if whole[:end].endswith(stop)]
        if starts:
            return whole[: min(starts)]
    return whole


@given(text, st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_the_text_ends_before_a_stop_string(whole: str, stops: list[str]):
    search, released = StopStrings(stops), ""
    wanted = cut(whole, stops)
    for character in whole:
        released += search.push(character)
        assert wanted.startswith(released), "a part of a stop string was shown"
        if search.found:
            break
    assert (search.found in stops) == (wanted != whole)
    assert released + search.rest() == wanted


@given(st.lists(text, max_size=5), st.text("ab", min_size=1, max_size=3))
def test_nothing_is_held_back_that_cannot_become_a_stop_string(pieces: list[str], stop: str):
    search, released = StopStrings([stop]), ""
    for piece in pieces:
        released += search.push(piece)
        if search.found:
            return
    held = "".join(pieces)[len(released) :]
    assert stop.startswith(held) and held != stop


def test_a_piece_that_is_not_searched_is_text():
    search = StopStrings(["end"])
    assert search.push("the end ", search=False) == "the end "
    assert search.push("e") + search.push("n") == ""
    assert search.push("d.") == "" and search.found and search.rest() == ""
