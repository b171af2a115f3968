"""How the calls of one request are written."""

import dataclasses
from collections.abc import Mapping

from jaxspec.serving.tool_formats.arguments import Kind
from jaxspec.serving.tool_formats.table import ToolFormat


@dataclasses.dataclass(frozen=True)
class CallSyntax:
    """How a text calls the tools of a request.

    Attributes:
      kinds: the names of the tools, and how values of their arguments are written, by name. Only
        formats that write each argument by itself have any; others are JSON.
      first: the number of the text's first call in the conversation.
    """

    form: ToolFormat
    kinds: Mapping[str, Mapping[str, Kind]]
    first: int = 0

    @property
    def longest_name(self) -> int:
        return max(map(len, self.kinds), default=0)
