"""Text on the terminal as it comes."""

import sys

from jaxspec import LLM, Completion, SamplingParams, TextChunk
from jaxspec.llm import Prompt


def stream(llm: LLM, prompt: Prompt, sampling: SamplingParams, show: bool = True) -> Completion:
    """Generate, writing the text to stdout as it comes unless ``show`` is False."""
    try:
        for event in llm.stream([prompt], sampling):
            if not isinstance(event, TextChunk):
                return event
            if show:
                sys.stdout.write(event.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        if show:
            sys.stdout.write("\n")  # what is said next begins a line
        raise
    raise AssertionError("a stream ends with its completion")
