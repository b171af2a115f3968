"""Streaming of generated text to the terminal."""

import sys

from jaxspec import LLM, Completion, SamplingParams, TextChunk
from jaxspec.llm.llm import Prompt


def stream(llm: LLM, prompt: Prompt, sampling: SamplingParams, show: bool = True) -> Completion:
    """Generate; with ``show``, write the text to stdout as it is generated."""
    try:
        for event in llm.stream([prompt], sampling):
            if not isinstance(event, TextChunk):
                return event
            if show:
                sys.stdout.write(event.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        if show:
            sys.stdout.write("\n")  # the next output begins on a new line
        raise
    raise AssertionError("a stream ends with its completion")
