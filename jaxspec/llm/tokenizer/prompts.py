"""What users give as prompts: text, token ids, chats."""

from collections.abc import Mapping, Sequence
from typing import Any

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Conversation = Sequence[Message]


def check_unicode(name: str, text: str) -> None:
    """Raise ValueError for text that cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is no valid Unicode: character {error.start} is half a surrogate pair"
        ) from None
