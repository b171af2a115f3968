"""`/tokenize` and `/detokenize`."""

from typing import Annotated, Any

from pydantic import Field

from jaxspec.serving.protocol.base import RequestBody, ResponseBody
from jaxspec.serving.protocol.sampling import TokenIds


class TokenizeRequest(RequestBody):
    """A prompt, or a chat's messages."""

    model: str | None = None
    prompt: str | None = None
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
