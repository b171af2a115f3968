"""Texts of any script: streamed, whole and alone they are the same, character by character."""

import re
from typing import Any

import pytest

from jaxspec import LLM
from tests.helpers.served import MODEL, with_client

WORDS = {
    "emoji": "😀👩🏽‍🚀🇩🇪",
    "cjk": "日本語한글",
    "cyrillic": "жизнь ",
    "arabic": "مرحبا ",
    "devanagari": "नमस्ते ",
    "quotes": "’“”",
}
SAMPLES, TOKENS = 2, 40


def asked(script: str) -> dict[str, Any]:
    """A request whose text is written in this script, a word of which its prompt repeats."""
    letters = "".join(sorted(set(WORDS[script])))
    return {
        "model": MODEL,
        "prompt": WORDS[script] * 2,
        "max_tokens": TOKENS,
        "temperature": 1.0,
        "seed": 3,
        "extra_body": {"structured_outputs": {"regex": f"[{letters}]{{{TOKENS}}}"}},
    }


def broken(prompt: str) -> dict[str, Any]:
    """A request whose text is bytes that only begin characters, or are in their middle."""
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 1.0,
        "seed": 4,
        "extra_body": {"allowed_token_ids": list(range(100, 256))},
    }


@pytest.mark.parametrize("name", [*WORDS, "broken"])
def test_a_text_does_not_depend_on_how_it_is_asked_for(llm: LLM, name: str):
    request = broken("😀") if name == "broken" else asked(name)

    async def ask(client: Any) -> tuple[list[str], ...]:
        create = client.completions.create
        whole = await create(n=SAMPLES, **request)
        streamed = [""] * SAMPLES
        async for chunk in await create(n=SAMPLES, stream=True, **request):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
        alone = []
        for sample in range(SAMPLES):
            own = await create(**request | {"seed": request["seed"] + sample})
            alone.append(own.choices[0].text)
        return [choice.text for choice in whole.choices], streamed, alone

    whole, streamed, alone = with_client(llm, ask)
    assert whole == streamed == alone
    if name != "broken":
        letters = set(WORDS[name])
        assert all(re.sub("\ufffd+$", "", text) != "" for text in whole)
        assert all(set(re.sub("\ufffd$", "", text)) <= letters for text in whole)
