"""Grammars of outputs that begin after reasoning."""

from typing import Any

import numpy as np
import pytest
import tokenizers

from jaxspec.config.structured_output import Reasoning, StructuredOutput
from jaxspec.engine.structured import GrammarCompiler, Matcher
from tests.helpers.small_tokenizers import byte_level, with_markup

TOKENIZER = with_markup(byte_level())
TOKENIZER.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
TOKENIZER.add_special_tokens(
    [tokenizers.AddedToken(t, normalized=False, special=True) for t in ("[THINK]", "[/THINK]")]
)
IDS = TOKENIZER.get_vocab()
COMPILER = GrammarCompiler(TOKENIZER.to_str(), TOKENIZER.get_vocab_size(), [IDS["<|im_end|>"]])
MARKERS = {"plain": ("<think>", "</think>"), "special": ("[THINK]", "[/THINK]")}
OUTPUTS: dict[str, tuple[dict[str, Any], str]] = {
    "json": ({"json_schema": {"enum": ["<b>"]}}, '"<b>"'),
    "regex": ({"regex": "[a-c]{2}"}, "ab"),
    "choice": ({"choice": ("yes", "<b>")}, "<b>"),
    "grammar": ({"grammar": 'start: "ab"'}, "ab"),
}


def tokens(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def takes(matcher: Matcher, token_ids: list[int]) -> bool:
    """Whether these tokens are a whole output."""
    matcher = matcher.copy()
    for token in token_ids:
        if not matcher.mask()[token // 32] >> np.uint32(token % 32) & 1:
            return False
        matcher.advance([token])
    return matcher.complete


@pytest.mark.parametrize("markers", MARKERS)
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("inside", [True, False])
def test_the_output_begins_after_the_reasoning(markers: str, output: str, inside: bool):
    begin, end = MARKERS[markers]
    fields, text = OUTPUTS[output]
    spec = StructuredOutput(**fields, reasoning=Reasoning(begin, end, inside))
    matcher, opening = COMPILER.matcher(spec), "" if inside else begin
    assert takes(matcher, tokens(f"{opening}I <b> {{so\n{end}{text}"))
    assert takes(matcher, tokens(f"{opening}{end}\n\n{text}"))
    assert takes(matcher, tokens(text)) != inside
    assert not takes(matcher, tokens(f"{opening}so{end}so{end}{text}"))
    assert not takes(matcher, tokens(f"{opening}so{text}"))
    assert inside or not takes(matcher, tokens(f"so{begin}{end}{text}"))


def test_a_marker_in_pieces_ends_reasoning_too():
    reasoning = Reasoning("<think>", "</think>", inside=True)
    matcher = COMPILER.matcher(StructuredOutput(choice=("yes",), reasoning=reasoning))
    spelled = [IDS[letter] for letter in "</think>"]
    assert takes(matcher, [*tokens("so"), *spelled, *tokens("yes")])
    assert not takes(matcher, [*tokens("so"), *spelled, *tokens("so</think>yes")])


def test_markers_may_stand_between_reasoning_and_output():
    reasoning = Reasoning("<think>", "</think>", dropped=("<|im_start|>", "<table>"))
    matcher = COMPILER.matcher(StructuredOutput(choice=("yes",), reasoning=reasoning))
    assert takes(matcher, tokens("<think>so</think><|im_start|><table>yes"))
    assert takes(matcher, tokens("<table>\nyes"))
    assert not takes(matcher, tokens("<table>so"))


CALLS = """
start: trigger "x" tail
spelled[lazy]: TEXT "<tool_call>"
trigger: spelled
tail: TEXT
TEXT: /(.|\\n)*/
"""


def test_a_call_ends_reasoning_that_is_optional():
    reasoning = Reasoning("<think>", "</think>", inside=True, optional=True)
    matcher = COMPILER.matcher(StructuredOutput(grammar=CALLS, reasoning=reasoning))
    assert takes(matcher, tokens("so</think>\n\nso<tool_call>x"))
    assert takes(matcher, tokens("so<tool_call>xso</think>"))
    assert not takes(matcher, tokens("so<tool_call>so</think><tool_call>x"))
