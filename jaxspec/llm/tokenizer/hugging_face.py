"""The tokenizers of transformers, and chats.

In the serving path only this file imports transformers, which takes half a second.
"""

import contextlib
import logging
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from jaxspec.checkpoints.hub import resolve_directory
from jaxspec.config.checks import check_unicode
from jaxspec.llm.tokenizer.prompts import Conversation
from jaxspec.models.json.values import read_json


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Hides the advice to install torch that transformers logs on import. It is not needed here."""
    logger, level = logging.getLogger("transformers"), logging.ERROR

    def is_grave(record: logging.LogRecord) -> bool:
        return record.levelno >= level

    logger.addFilter(is_grave)
    try:
        yield
    finally:
        logger.removeFilter(is_grave)


with _without_advice():
    import transformers

type Tokenizer = transformers.PreTrainedTokenizerBase

_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError)
_ANSWER = "jaxspecanswer"  # stands for an assistant's; templates have no such word


def load_tokenizer(model: str | Path) -> Tokenizer:
    """The model's own tokenizer. Raises ValueError if there is none or it cannot be loaded.

    A tokenizer.json is read directly. Only a model without one needs transformers' AutoTokenizer,
    which imports torch where torch is installed.
    """
    directory = resolve_directory(model)
    has_file = (directory / "tokenizer.json").is_file()
    if not has_file:
        _check_no_code(directory)
    kind = transformers.PreTrainedTokenizerFast if has_file else transformers.AutoTokenizer
    try:
        return kind.from_pretrained(directory)
    except Exception as error:  # the tokenizers library raises Exception itself
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{directory} holds no tokenizer that loads: {reason}") from error


def _check_no_code(directory: Path) -> None:
    """Raise ValueError for a tokenizer that is Python code of its repository, as Kimi K2's:
    transformers would ask on the terminal whether to run it."""
    path = directory / "tokenizer_config.json"
    named = read_json(path).get("auto_map") if path.is_file() else None
    if isinstance(named, dict) and "AutoTokenizer" in named:
        raise ValueError(
            f"{directory} holds no tokenizer that loads: auto_map of {path.name} names Python code "
            "of the repository, which is not run. Add a tokenizer.json to the directory, or remove "
            f"{path.name} and give prompts as token ids"
        )


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """The text of the tokenizer's tokenizer.json, added tokens included.

    Raises ValueError for a tokenizer that has none.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"{tokenizer.name_or_path} has no tokenizer.json: save it as a fast tokenizer"
        )
    return backend.to_str()


def tokenize_chats(
    tokenizer: Tokenizer,
    messages: Conversation | Sequence[Conversation],
    chat_template: str | None = None,
    template_variables: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """Token ids of one conversation, or of each of several, up to the assistant's answer.

    Args:
      messages: objects with ``role`` and ``content``, or a list of such lists.
      chat_template: a Jinja template to use instead of the model's own.
      template_variables: further variables of the template, such as ``enable_thinking``.

    Raises ValueError for invalid messages, for messages that the template refuses, and if there is
    no template.
    """
    if chat_template is None and tokenizer.chat_template is None:
        raise ValueError(
            f"{tokenizer.name_or_path} has no chat template: pass one with chat_template=, or use "
            "generate with the whole prompt"
        )
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(
            "messages must be a list of objects with role and content, or of such lists"
        )
    conversations = [messages] if isinstance(messages[0], Mapping) else messages
    for conversation in conversations:
        _check_conversation(conversation)
    apply: Any = tokenizer.apply_chat_template  # its annotations do not cover all valid arguments
    try:
        return [
            apply(
                conversation,
                chat_template=chat_template,
                tokenize=True,
                return_dict=False,
                **({"add_generation_prompt": True} | dict(template_variables or {})),
            )
            for conversation in conversations
        ]
    except _REFUSALS as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the chat template refuses these messages: {reason}") from error


def render_chat(
    tokenizer: Tokenizer,
    messages: Conversation,
    chat_template: str | None = None,
    template_variables: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation, as the template writes it.

    Raises ValueError for messages that the template refuses.
    """
    apply: Any = tokenizer.apply_chat_template
    try:
        return str(
            apply(
                messages, chat_template=chat_template, tokenize=False, **(template_variables or {})
            )
        )
    except _REFUSALS as error:
        raise ValueError(f"the chat template refuses: {' '.join(str(error).split())}") from error


def turn_end(tokenizer: Tokenizer, chat_template: str | None = None) -> tuple[int, ...]:
    """The special or added token that follows the assistant's answer in the chat template.

    Nothing if there is no template, if it refuses a short chat, and if no such token follows.
    """
    if chat_template is None and tokenizer.chat_template is None:
        return ()
    messages = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": _ANSWER},
    ]
    try:
        text = render_chat(tokenizer, messages, chat_template)
    except ValueError:
        return ()
    _, found, rest = text.rpartition(_ANSWER)
    after = rest.lstrip() if found else ""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    tokens = [
        (len(token.content), id_)
        for id_, token in added.items()
        if token.content and after.startswith(token.content)
    ]
    return (max(tokens)[1],) if tokens else ()


def _check_conversation(conversation: object) -> None:
    if not isinstance(conversation, (list, tuple)) or not conversation:
        raise ValueError("a conversation must be a list of messages, with at least one")
    for message in conversation:
        if not (isinstance(message, Mapping) and isinstance(message.get("role"), str)):
            raise ValueError(
                f"a message must be an object with role and content, got {reprlib.repr(message)}"
            )
        content = message.get("content")
        if isinstance(content, str):
            check_unicode("a message", content)
