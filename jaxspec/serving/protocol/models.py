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


class AnthropicModel(ResponseBody):
    """A model, as Anthropic's clients know models. ``created_at`` is when the server began."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str  # RFC 3339
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class AnthropicModelList(ResponseBody):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None
