"""`/v1/models`."""

from typing import Literal

from jaxspec.serving.protocol.base import ResponseBody


class ModelCard(ResponseBody):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxspec"
    max_model_len: int


class ModelList(ResponseBody):
    object: Literal["list"] = "list"
    data: list[ModelCard]
