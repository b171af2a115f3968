"""Text and chats to token ids, with the model's own tokenizer.

Only this file imports transformers, which takes a fifth of the time of `import jaxspec`.
"""

import contextlib
import logging
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from jaxspec.weights.hub import resolve_directory


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Where torch is absent, transformers says so when it is imported. Nothing here needs torch."""
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
Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Conversation = Sequence[Message]


def load_tokenizer(model: str | Path) -> Tokenizer:
    """The model's own tokenizer. Raises ValueError if it has none that loads.

    A tokenizer.json is read as it is. Only a model without one needs transformers' AutoTokenizer,
    which imports torch where it is installed.
    """
    directory = resolve_directory(model)
    has_file = (directory / "tokenizer.json").is_file()
    kind = transformers.PreTrainedTokenizerFast if has_file else transformers.AutoTokenizer
    try:
        return kind.from_pretrained(directory)
    except Exception as error:  # the tokenizers library raises Exception itself
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{directory} holds no tokenizer that loads: {reason}") from error


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


def tokenize(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of every prompt; those that are token ids already are copied.

    Raises ValueError for anything else, and for empty text.
    """
    if isinstance(prompts, (str, bytes, Mapping)) or not hasattr(prompts, "__len__"):
        raise ValueError(f"prompts must be a list of prompts, not one {type(prompts).__name__}")
    return [_tokenize(tokenizer, index, prompt) for index, prompt in enumerate(prompts)]


def _tokenize(tokenizer: Tokenizer, index: int, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f"prompt {index} is empty: give it at least one character")
        _check_unicode(f"prompt {index}", prompt)
        return list(tokenizer(prompt, verbose=False)["input_ids"])
    if isinstance(prompt, (bytes, bytearray, Mapping)) or not hasattr(prompt, "__len__"):
        raise ValueError(
            f"prompt {index} must be text or a list of token ids, not {type(prompt).__name__}"
        )
    return list(prompt)


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is no valid Unicode: character {error.start} is half a surrogate pair"
        ) from None


def tokenize_chats(
    tokenizer: Tokenizer,
    messages: Conversation | Sequence[Conversation],
    chat_template: str | None = None,
    template_variables: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """Token ids of one conversation, or of each of several, up to where the assistant answers.

    Args:
      messages: objects with ``role`` and ``content``, or a list of such lists.
      chat_template: a Jinja template to use instead of the model's own.
      template_variables: what the template reads beside messages, such as ``enable_thinking``.

    Raises ValueError for messages that are none, or that the template refuses, and where there is
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
    apply: Any = tokenizer.apply_chat_template  # its types say less than it takes
    try:
        return [
            apply(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **(template_variables or {}),
            )
            for conversation in conversations
        ]
    except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the chat template refuses these messages: {reason}") from error


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
            _check_unicode("a message", content)
