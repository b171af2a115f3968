"""`/tokenize`, `/detokenize` and `/tokenizer_info`."""

from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from pydantic import Field

from jaxspec.serving.protocol.base import REFUSED_EVERYWHERE, Refused, RequestBody, ResponseBody
from jaxspec.serving.protocol.chat import Message, Tools
from jaxspec.serving.protocol.sampling import TokenIds


class TokenizeRequest(RequestBody):
    """A prompt, or a chat's messages.

    ``add_special_tokens`` is of prompts: with the tokens that stand around every text. The chat
    template has its own. The fields after ``messages`` are of chats.
    """

    refused: ClassVar[Refused] = MappingProxyType(
        {
            **REFUSED_EVERYWHERE,
            "chat_template": ((), "give it to the server, with --chat-template"),
        }
    )

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None


class TokenizeResponse(ResponseBody):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    model: str | None = None
    tokens: TokenIds


class DetokenizeResponse(ResponseBody):
    prompt: str


class TokenizerInfo(ResponseBody):
    """What clients need who encode texts by `/tokenize`: special tokens, and the chat template."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
