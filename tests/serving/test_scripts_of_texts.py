"""Texts of any script: streamed, whole and alone they are the same, character by character."""

import re
from typing import Any

import pytest

from jaxspec import LLM
from tests.helpers.marks import slow
from tests.helpers.served import MODEL, ask

WORDS = {
    "emoji": "😀👩🏽‍🚀🇩🇪",
    "cjk": "日本語한글",
    "cyrillic": "жизнь ",
    "arabic": "مرحبا ",
    "devanagari": "नमस्ते ",
    "quotes": "’“”",
}
SAMPLES, TOKENS = 2, 40


def asked(name: str) -> dict[str, Any]:
    """A request whose text is written in this script, a word of which its prompt repeats; or is
    bytes that only begin characters, or are in their middle."""
    if name == "broken":
        prompt, body = "😀", {"allowed_token_ids": list(range(100, 256))}
    else:
        letters = "".join(sorted(set(WORDS[name])))
        prompt = WORDS[name] * 2
        body = {"structured_outputs": {"regex": f"[{letters}]{{{TOKENS}}}"}}
    fields = {"model": MODEL, "max_tokens": TOKENS, "temperature": 1.0, "seed": 3}
    return {**fields, "prompt": prompt, "extra_body": body}


FAST = ("emoji", "devanagari", "broken")  # of four, three and one byte a character


@pytest.mark.parametrize(
    "name", [name if name in FAST else slow(name) for name in [*WORDS, "broken"]]
)
def test_a_text_does_not_depend_on_how_it_is_asked_for(llm: LLM, name: str):
    request = asked(name)
    several = {**request, "n": SAMPLES}
    alone = [{**request, "seed": request["seed"] + sample} for sample in range(SAMPLES)]
    answer, chunks, *answers = ask(llm, several, {**several, "stream": True}, *alone)
    whole, streamed = [choice.text for choice in answer.choices], [""] * SAMPLES
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        streamed[choice.index] += choice.text
    assert whole == streamed == [one.choices[0].text for one in answers]
    if name != "broken":
        letters = set(WORDS[name])
        assert all(re.sub("\ufffd+$", "", text) != "" for text in whole)
        assert all(set(re.sub("\ufffd$", "", text)) <= letters for text in whole)
