"""Pieces of grammars in llguidance's variant of Lark, and reasoning before an output."""

import json

from jaxspec.config.structured_output import Reasoning
from jaxspec.engine.structured.added_tokens import Markers, lark_string

BLANK_LINE = r"/\n{0,2}/"
# A grammar's first line. Without forcing, a text may be any tokens that spell it.
FORCING, NO_FORCING = "%llguidance {}\n", '%llguidance {"no_forcing": true}\n'
MOST_DROPPED = 2  # markers between the reasoning and the output


def after_reasoning(grammar: str, reasoning: Reasoning, markers: Markers) -> str:
    """A grammar of an output, in JSON or Lark, with reasoning before it.

    Any text is reasoning, up to the first end marker, however its tokens spell it; a special token
    is never spelled.
    """
    end = reasoning.end
    if markers.is_special(end):
        rules = [f"reasoning: TEXT {markers.token(end)}"]
    else:
        rules = [f"reasoning[lazy]: TEXT {lark_string(end)}"]
    rules.append(r"TEXT: /(.|\n)*/")
    thought = f"reasoning {BLANK_LINE}"
    if not reasoning.inside:
        thought = f"({BLANK_LINE} {markers.literal(reasoning.begin)} {thought})?"
    start = f"start: {thought} dropped @answer"
    if reasoning.optional:
        begin = "" if reasoning.inside else f"{BLANK_LINE} {markers.literal(reasoning.begin)} "
        start += f" | {begin}@answer"
    dropped = " | ".join(markers.literal(marker) for marker in reasoning.dropped)
    each = f"(({dropped}) {BLANK_LINE}){{0,{MOST_DROPPED}}}" if dropped else '""'
    header = NO_FORCING if '"no_forcing": true' in grammar else FORCING
    whole = header + "\n".join([start, *rules, f"dropped: {each}"])
    return json.dumps(
        {"grammars": [{"lark_grammar": whole}, {**_content(grammar), "name": "answer"}]}
    )


def _content(grammar: str) -> dict[str, object]:
    """A grammar as a part of another one."""
    try:
        given = json.loads(grammar)
    except ValueError:
        given = None
    match given:
        case {"grammars": [{**content}]}:
            return content
    return {"lark_grammar": grammar}
