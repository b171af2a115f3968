"""LLMOptions: what an LLM is made with."""

import dataclasses
from typing import Literal

from jaxspec.checkpoints.load_options import LoadOptions
from jaxspec.config.engine import EngineConfig
from jaxspec.llm.tokenizer.text import TextTokenizer
from jaxspec.parallel.processes import Processes


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LLMOptions(LoadOptions):
    """A target, its drafter, and how an engine serves them.

    Attributes:
      page_size, num_pages: see CacheConfig; ``kv_memory`` is its ``memory``.
      max_length: most tokens of a request, prompt included; by default what the model allows, at
        most 2048. ``"model"``: what it allows, or as many as fit the memory; on CPUs at most 2048,
        as requests that name no limit would be slow.
      engine: how many requests run together, and how; see EngineConfig.
      tokenizer: the model's, if it has been read already. A model without any takes prompts of
        token ids, and the text of their completions is empty.
      processes: those that share the model, whose devices ``mesh`` has; see LLM.follow.
    """

    page_size: int = 16
    max_length: int | Literal["model"] | None = None
    num_pages: int | None = None
    kv_memory: int | None = None
    engine: EngineConfig | None = None
    tokenizer: TextTokenizer | None = None
    processes: Processes | None = None
