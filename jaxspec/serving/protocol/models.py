"""`/v1/models`."""

from typing import Literal

from jaxspec.serving.protocol.base import ResponseBody


class StopToken(ResponseBody):
    """A token that ends texts. ``chats_only``: as it ends a turn in the chat template."""

    id: int
    text: str
    chats_only: bool


class ModelCard(ResponseBody):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxspec"
    max_model_len: int
    stop_tokens: list[StopToken]


class ModelList(ResponseBody):
    object: Literal["list"] = "list"
    data: list[ModelCard]
