"""What users give as prompts: text, token ids, chats."""

from collections.abc import Mapping, Sequence
from typing import Any

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Conversation = Sequence[Message]
