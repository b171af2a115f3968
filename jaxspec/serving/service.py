"""What the routes share: the model, its name, and whether it serves."""

import asyncio
import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from jaxspec.llm.async_llm import AsyncLLM
from jaxspec.llm.replicas import ReplicatedLLM
from jaxspec.llm.tokenizer import render_chat
from jaxspec.serving.background import WarmUp
from jaxspec.serving.effort_trial import reasoning_off
from jaxspec.serving.errors import ApiError, NotReady
from jaxspec.serving.fingerprint import fingerprint
from jaxspec.serving.results import TokenTexts, now
from jaxspec.serving.template_trial import TOOL, USER, ToolUse, tool_use

State = Literal["loading", "ready", "ending"]


class Weights(NamedTuple):
    """What an answer says of the weights that made it."""

    weight_version: str | None
    fingerprint: str


@dataclasses.dataclass
class Service:
    """A model that is loading, serves, or ends.

    Attributes:
      names: of the model, as clients may call it; the first one is shown.
      chat_template: a Jinja template instead of the model's own.
      tool_format: how the model writes calls of tools, see tool_formats/table.py; None: as its chat
        template tells.
      reasoning_format: what stands around its reasoning, see reasoning.FORMATS, or ``none``; None:
        as its chat template tells.
      json_whitespace: whether answers that must be JSON may have white space, see
        StructuredOutput.whitespace.
      template_variables: of the chat template, for requests that lack them.
      request_timeout: seconds after which a request ends; None: never.
      max_new_tokens: most tokens that one text may have; None: all that fit.
      sampling_defaults: fields of SamplingParams for requests that lack them.
      under_way: requests that have begun and not ended.
      fingerprint: of model and configuration, see fingerprint; empty while it loads.
      weight_version: of the weights in use, where an admin may change them; None: nobody may.
      paused: whether new requests are refused until an admin lets them come again.
      warm_up: how far compiling in the background is.
      cut: set when those that are still under way must end, see draining.
    """

    names: tuple[str, ...]
    chat_template: str | None = None
    tool_format: str | None = None
    reasoning_format: str | None = None
    json_whitespace: bool = True
    template_variables: Mapping[str, Any] = MappingProxyType({})
    request_timeout: float | None = None
    max_new_tokens: int | None = None
    sampling_defaults: Mapping[str, Any] = MappingProxyType({})
    state: State = "loading"
    under_way: int = 0
    cut: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    created: int = dataclasses.field(default_factory=now)
    fingerprint: str = ""
    weight_version: str | None = None
    paused: bool = False
    warm_up: WarmUp = dataclasses.field(default_factory=WarmUp)
    _llm: AsyncLLM | ReplicatedLLM | None = None
    _weights: dict[int, Weights] = dataclasses.field(default_factory=dict)  # by engine's versions

    def start(self, llm: AsyncLLM | ReplicatedLLM) -> None:
        """From now on requests are served."""
        self._llm = llm
        self.use_version(self.weight_version)
        self.state = "ready" if self.state == "loading" else self.state

    def use_version(self, weight_version: str | None) -> None:
        """The weights in use are of this version."""
        weights = self.name_weights(self.llm.llm.engine.version, weight_version)
        self.weight_version, self.fingerprint = weight_version, weights.fingerprint

    def name_weights(self, version: int, weight_version: str | None) -> Weights:
        """Answers made by the weights that engines call ``version`` are of ``weight_version``."""
        found = fingerprint(self.name, self.llm.llm.params, weight_version)
        self._weights[version] = Weights(weight_version, found)
        return self._weights[version]

    @property
    def version_in_use(self) -> str | None:
        """The version of the weights in use, also of those that a program gave the engine."""
        if self._llm is None:
            return self.weight_version
        return self.weights_of(self._llm.llm.engine.version).weight_version

    def weights_of(self, version: int) -> Weights:
        """What made an answer. Weights that a program gave the engine are named by their number."""
        found = self._weights.get(version)
        return self.name_weights(version, str(version)) if found is None else found

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def is_loaded(self) -> bool:
        """Whether there is a model, also while the server ends."""
        return self._llm is not None

    @property
    def llm(self) -> AsyncLLM | ReplicatedLLM:
        """Also while the server ends, for what is under way. Raises NotReady while it loads."""
        if self._llm is None:
            raise NotReady(self.state)
        return self._llm

    @functools.cached_property
    def texts(self) -> TokenTexts:
        """Raises NotReady."""
        return TokenTexts(self.llm.llm)

    @property
    def shows_trees(self) -> bool:
        """Whether the engine emits the tree of every round."""
        return self.llm.llm.engine.config.trees

    @property
    def max_length(self) -> int:
        return self.llm.llm.engine.cache.max_length

    @property
    def compiling(self) -> list[str]:
        """The programs that are compiled now, as people call them."""
        engines = [llm.llm.engine for llm in self.llm.replicas]
        return [name for engine in engines for name in engine.programs.compiled_now()]

    def template(self, tools: bool = False) -> str | None:
        """The template of chats, if there is one. A model may have one of its own for ``tools``."""
        template = self.chat_template or self.llm.llm.tokenizer.chat_template
        if isinstance(template, dict):  # templates of several uses, by name
            default = template.get("default")
            template = template.get("tool_use", default) if tools else default
        return None if template is None else str(template)

    @functools.cached_property
    def tool_use(self) -> ToolUse:
        """How the template of chats uses tools, found by a trial. Raises ValueError if there is no
        tokenizer."""
        template, tokenizer = self.template(tools=True) or "", self.llm.llm.tokenizer
        variables = {**self.template_variables, "tools": [TOOL]}
        return tool_use(
            template, lambda messages: render_chat(tokenizer, messages, template, variables)
        )

    @functools.cached_property
    def reasoning_off(self) -> Mapping[str, Any] | None:
        """The variables with which the template of chats turns reasoning off, found by a trial;
        None: it cannot."""
        template, tokenizer = self.template() or "", self.llm.llm.tokenizer
        given = {**self.template_variables, "add_generation_prompt": True}
        return reasoning_off(
            lambda variables: render_chat(tokenizer, [USER], template, {**given, **variables})
        )

    def turn_end(self) -> tuple[int, ...]:
        """The token that ends a turn of chats, beside the model's stop tokens."""
        return self.llm.llm.turn_end(self.chat_template)

    def check(self, model: str | None = None) -> None:
        """Raise NotReady if no request may begin, and ApiError for a model that is not served."""
        if self.state != "ready":
            raise NotReady(self.state)
        if model is not None and model not in self.names:
            raise ApiError(
                404,
                f"the model {model!r} does not exist: this server has {self.name!r}",
                kind="not_found_error",
                param="model",
                code="model_not_found",
            )

    async def close(self) -> None:
        self.state = "ending"
        if self._llm is not None:
            await self._llm.close()
