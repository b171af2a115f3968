"""Text and chats to token ids, and back, with the model's own tokenizer.

Only ``hugging_face`` needs transformers, which takes as long to import as jax: it is loaded for
chats, and for models whose tokenizer is more than their tokenizer.json.
"""

from typing import TYPE_CHECKING

from jaxspec._lazy import lazy_names

if TYPE_CHECKING:
    from jaxspec.llm.tokenizer.hugging_face import (
        Tokenizer,
        load_tokenizer,
        render_chat,
        tokenize_chats,
        tokenizer_json,
        turn_end,
    )
    from jaxspec.llm.tokenizer.prompts import Conversation, Message, Prompt
    from jaxspec.llm.tokenizer.text import TextTokenizer, tokenize

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "jaxspec.llm.tokenizer.hugging_face": (
            *("Tokenizer", "load_tokenizer", "render_chat", "tokenize_chats", "tokenizer_json"),
            "turn_end",
        ),
        "jaxspec.llm.tokenizer.prompts": ("Conversation", "Message", "Prompt"),
        "jaxspec.llm.tokenizer.text": ("TextTokenizer", "tokenize"),
    },
)

__all__ = [
    "Conversation",
    "Message",
    "Prompt",
    "TextTokenizer",
    "Tokenizer",
    "load_tokenizer",
    "render_chat",
    "tokenize",
    "tokenize_chats",
    "tokenizer_json",
    "turn_end",
]
