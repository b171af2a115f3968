"""Answers of chats in the shapes of other APIs: written part by part, as events or whole."""

import abc
import contextlib
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel

from jaxspec.engine.generation import TokenLogprob
from jaxspec.llm.completion import Completion
from jaxspec.serving.chat import PreparedChat
from jaxspec.serving.errors import ApiError, api_error
from jaxspec.serving.parts import Part
from jaxspec.serving.prepared import Told
from jaxspec.serving.protocol.base import FieldError

type Event = dict[str, Any]  # with its "type"


class AnswerWriter(abc.ABC):
    """Writes one answer: ``begin``, ``push`` for its parts, then ``end`` or ``failed``.

    Each returns the events that are new. ``made_by`` is told before, and ``tokens`` before the
    parts that they make.
    """

    prepared: PreparedChat

    @abc.abstractmethod
    def made_by(self, weight_version: str | None) -> None:
        """The version of the weights; None: nobody may change them."""

    @abc.abstractmethod
    def begin(self) -> list[Event]:
        """Before the first part."""

    @abc.abstractmethod
    def tokens(self, entries: Sequence[TokenLogprob]) -> None:
        """Log-probabilities of new tokens, which not every API tells."""

    @abc.abstractmethod
    def push(self, parts: Sequence[Part]) -> list[Event]:
        """What is new."""

    @abc.abstractmethod
    def end(self, completion: Completion) -> list[Event]:
        """After the last part. Raises ApiError for an answer that did not end as it should."""

    @abc.abstractmethod
    def failed(self, error: ApiError) -> list[Event]:
        """Instead of what is missing."""

    @abc.abstractmethod
    def whole(self) -> BaseModel:
        """The answer, after its end."""


# Checks and encodes a request when it is called.
type Preparing = Callable[[], Awaitable[AnswerWriter]]


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


@contextlib.contextmanager
def renamed_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Lets errors of a chat name the fields of another API.

    ``names``: patterns of the chat's fields, and what they are there.
    """
    try:
        yield
    except (ApiError, FieldError, RequestValidationError) as raised:
        error = api_error(raised)
        if error.param is None:
            raise
        for pattern, name in names.items():
            if found := re.fullmatch(pattern, error.param):
                param = found.expand(name)
                if error.message.startswith(error.param):
                    error.message = param + error.message.removeprefix(error.param)
                error.param = param
                break
        raise error from raised


async def answer(prepare: Preparing, told: Told) -> BaseModel:
    """The whole answer.

    Raises ApiError, and what AsyncLLM.generate raises.
    """
    writer = await prepare()
    prepared = writer.prepared
    told.spend(len(prepared.prompts[0]))
    [completion] = await prepared.service.llm.generate(
        prepared.prompts,
        prepared.sampling,
        timeout=prepared.service.request_timeout,
        options=prepared.options,
        on_tokens=told.spend,
    )
    told.ended(prepared, [completion])
    writer.made_by(prepared.service.weights_of(completion.version).weight_version)
    writer.begin()
    writer.tokens(completion.logprobs or [])
    writer.push(prepared.parser().push(completion.text, last=True))
    writer.end(completion)
    return writer.whole()


async def begin_stream(
    prepare: Preparing, told: Told
) -> tuple[AnswerWriter, Event, AsyncGenerator[Event, None]]:
    """The writer of an answer, the first event, and the others.

    What goes wrong before there is a token is raised here.
    """
    writer = await prepare()
    events = stream(writer, told)
    return writer, await anext(events), events


async def stream(writer: AnswerWriter, told: Told) -> AsyncGenerator[Event, None]:
    """The answer as events."""
    prepared = writer.prepared
    parser, begun = prepared.parser(), False
    told.spend(len(prepared.prompts[0]))
    chunks = prepared.service.llm.stream(
        prepared.prompts,
        prepared.sampling,
        timeout=prepared.service.request_timeout,
        options=prepared.options,
    )
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            events = []
            if not begun:  # a stream is of the weights that began it
                writer.made_by(prepared.service.weights_of(chunk.version).weight_version)
                events, begun = writer.begin(), True
            if isinstance(chunk, Completion):
                told.ended(prepared, [chunk])
                events += writer.end(chunk)
            else:
                told.spend(len(chunk.token_ids))
                writer.tokens(chunk.logprobs or [])
                events += writer.push(parser.push(chunk.text, last=chunk.done))
            for event in events:
                yield event
