"""Text on the terminal as it is generated, and a small chat that shows each answer's acceptance."""

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from jaxspec import LLM, Completion, SamplingParams, TextChunk
from jaxspec.llm.completion import decode_rate
from jaxspec.llm.llm import Prompt

if TYPE_CHECKING:
    from jaxspec.llm.tokenizer import Tokenizer

Message = dict[str, str]  # role, content


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


def check_chat_template(tokenizer: "Tokenizer", model: str) -> None:
    """Raises ValueError for a tokenizer without a chat template."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"{model} has no chat template: --chat needs an instruction-tuned model (without "
            "--chat, a prompt is continued)"
        )


def typed_lines() -> Iterator[str]:
    """The lines that the user types, until Ctrl-D."""
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


def chat(llm: LLM, sampling: SamplingParams, lines: Iterable[str]) -> None:
    """Answer each line until ``/exit``. Earlier lines are part of the prompt until ``/clear``."""
    messages: list[Message] = []
    for line in map(str.strip, lines):
        if line == "/exit":
            return
        if line == "/clear":
            messages = []
        elif line.startswith("/"):
            print("commands: /clear forgets the chat so far, /exit or Ctrl-D ends it")
        elif line:
            messages = converse(llm, sampling, [*messages, {"role": "user", "content": line}])


def converse(llm: LLM, sampling: SamplingParams, messages: list[Message]) -> list[Message]:
    """Show the answer to the last message; returns the messages with it.

    If the chat has become too long, returns the messages without the last one.
    """
    try:
        [prompt] = llm.chat_prompts(messages)
        completion = stream(llm, prompt, sampling.ending_at(llm.turn_end()))
    except ValueError as error:  # a chat that has become too long
        print(f"{error} (/clear forgets the chat so far)")
        return messages[:-1]
    print(f"\n[{describe(completion)}]")
    return [*messages, {"role": "assistant", "content": completion.text}]


def describe(completion: Completion) -> str:
    parts = [
        f"{len(completion.token_ids)} tokens",
        f"{completion.acceptance_length:.2f} a round",
        f"{decode_rate([completion]):.1f} tokens/s",
    ]
    if completion.finish_reason == "length":
        parts.append("cut at --max-tokens")
    if completion.error:
        parts.append(completion.error)
    return ", ".join(parts)
