"""`/tokenize`, `/detokenize` and `/tokenizer_info`."""

from typing import Annotated, Any

from pydantic import Field

from jaxspec.serving.protocol.base import RequestBody, ResponseBody
from jaxspec.serving.protocol.sampling import TokenIds


class TokenizeRequest(RequestBody):
    """A prompt, or a chat's messages.

    ``add_special_tokens`` is of prompts: with the tokens that stand around every text. The chat
    template has its own.
    """

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


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
