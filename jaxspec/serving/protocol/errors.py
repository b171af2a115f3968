"""Errors."""

from jaxspec.serving.protocol.base import ResponseBody


class ErrorDetails(ResponseBody):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(ResponseBody):
    error: ErrorDetails
