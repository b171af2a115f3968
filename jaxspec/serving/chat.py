"""`/v1/chat/completions`: answers to conversations, which may call tools."""

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.config.structured_output import JSON_KINDS, StructuredOutput
from jaxspec.engine.generation import TokenLogprob
from jaxspec.llm.completion import Completion, TextChunk
from jaxspec.serving import results
from jaxspec.serving.answer_parser import AnswerForm, AnswerParser
from jaxspec.serving.bad_words import without_bad_words
from jaxspec.serving.chat_reasoning import (
    ChatReasoning,
    chat_reasoning,
    reasoning_budget,
    reasoning_tokens,
)
from jaxspec.serving.errors import ApiError
from jaxspec.serving.messages import template_messages, template_variables
from jaxspec.serving.parts import Part
from jaxspec.serving.prepared import ChoiceWriter, PreparedRequest
from jaxspec.serving.protocol.base import FieldError
from jaxspec.serving.protocol.chat import (
    ChatChoice,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    FunctionCall,
    Tool,
    ToolCall,
    TopLogprob,
)
from jaxspec.serving.protocol.sampling import CompletionTokensDetails, Usage
from jaxspec.serving.reasoning import reasoning_format
from jaxspec.serving.sampling import (
    MOST_CHARACTERS,
    check_stream,
    sampling_params,
    text_options,
    tokens_left,
    truncated,
)
from jaxspec.serving.service import Service
from jaxspec.serving.structured import structured_output
from jaxspec.serving.tool_formats.table import FORMATS
from jaxspec.serving.tool_grammar import ToolGrammar
from jaxspec.serving.tools import call_token, earlier_calls, is_free, offered_tools


@dataclasses.dataclass(frozen=True)
class PreparedChat(PreparedRequest[ChatRequest, ChatChoice, ChatResponse]):
    """A conversation, ready for the engine.

    Attributes:
      form: what an answer may consist of.
      reasoning: how it reasons; None: it does not.
    """

    operation = "chat"

    form: AnswerForm
    reasoning: ChatReasoning | None = dataclasses.field(default=None, kw_only=True)

    def response(
        self, choices: list[ChatChoice], version: int, *, chunk: bool = False
    ) -> ChatResponse:
        weights = self.service.weights_of(version)
        return ChatResponse(
            id=self.id,
            object="chat.completion.chunk" if chunk else "chat.completion",
            created=self.created,
            model=self.service.name,
            system_fingerprint=weights.fingerprint,
            weight_version=weights.weight_version,
            choices=choices,
        )

    def choice(self, index: int, completion: Completion) -> ChatChoice:
        texts = self.service.texts
        reason = results.finish_reason(completion)
        message = _message(self.shown(self.parser().push(completion.text, last=True)))
        if message.tool_calls and reason == "stop":
            reason = "tool_calls"
        choice = ChatChoice(index=index, message=message, finish_reason=reason)
        if completion.logprobs is not None and self.request.logprobs:
            entries = self.text_logprobs(completion.logprobs, completion.token_ids)
            choice.logprobs = chat_logprobs(texts, entries)
        self.add_asked(choice, completion)
        return choice

    def parser(self) -> AnswerParser:
        """A parser for the text of one choice."""
        return AnswerParser(self.form)

    def shown(self, parts: Sequence[Part]) -> list[Part]:
        """The parts that are sent."""
        hides = self.request.include_reasoning is False
        return [part for part in parts if not (part.reasoning and hides)]

    def usage(self, completions: Sequence[Completion]) -> Usage:
        usage = super().usage(completions)
        if self.reasoning is not None:
            decode = self.service.llm.llm.detokenize
            counts = [
                reasoning_tokens(self.reasoning, self.form, completion.token_ids, decode)
                for completion in completions
            ]
            usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=sum(counts))
        return usage

    def writer(self, index: int) -> "ChatWriter":
        return ChatWriter(self, index)


class ChatWriter(ChoiceWriter[ChatChoice]):
    """Writes the chunks of one choice of a conversation."""

    def __init__(self, prepared: PreparedChat, index: int):
        super().__init__(prepared, index)
        self._begun = False
        self._parser, self._shown = prepared.parser(), prepared.shown

    def chunks(self, event: TextChunk) -> list[ChatChoice]:
        parts = self._shown(self._parser.push(event.text, last=event.done))
        deltas = [_delta(part) for part in parts]
        if not self._begun:
            self._begun = True
            beginning = deltas[0] if deltas and deltas[0].tool_calls is None else ChatDelta()
            deltas = deltas[1:] if beginning in deltas else deltas
            beginning.role, beginning.content = "assistant", beginning.content or ""
            deltas = [beginning, *deltas]
        if not deltas and self.has_asked(event):
            deltas = [ChatDelta(content="")]
        choices = [ChatChoice(index=self.index, delta=delta) for delta in deltas]
        if choices:
            self.add_tokens(choices[0], event)
        return choices

    def ending(self, reason: str) -> ChatChoice:
        if self._parser.calls and reason == "stop":
            reason = "tool_calls"
        return ChatChoice(index=self.index, delta=ChatDelta(), finish_reason=reason)

    def logprobs(self, entries: Sequence[TokenLogprob]) -> ChatLogprobs:
        return chat_logprobs(self.prepared.service.texts, entries)


async def prepare(service: Service, request: ChatRequest) -> PreparedChat:
    """The request as the engine takes it. Raises ApiError for one that cannot be served."""
    service.check(request.model)
    _check_together(request)
    tools = offered_tools(request)
    template = chat_template(service, bool(tools))
    structured = structured_output(request, whitespace=service.json_whitespace)
    is_json = structured is not None and structured.kind in JSON_KINDS
    if structured is not None and is_json:
        structured = dataclasses.replace(structured, blank_line=True)
    form, free = None, bool(tools) and structured is None and is_free(request)
    if tools:
        calls = await _tool_grammar(service, request, tools, structured)
        form, structured = calls.syntax(), await _compiled(service, calls)
    prompt = await prompt_ids(service, request)
    marks = reasoning_format(service.reasoning_format, template)
    reasoning = None if marks is None else chat_reasoning(service.llm.llm, marks, request, prompt)
    trigger = form.form.trigger if form and free else ""
    if structured is not None and reasoning is not None:
        structured = reasoning.before(structured, calls=bool(trigger))
    # Free text may spell what begins a call in other tokens; the grammar would not see that call.
    if structured is not None and trigger and not any(tool.function.strict for tool in tools):
        structured = dataclasses.replace(structured, trigger=call_token(service.llm.llm, trigger))
    turn_end = service.turn_end()
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    wanted = request.max_completion_tokens or request.max_tokens
    if wanted is not None and wanted < 1:
        raise FieldError("max_tokens", f"max_tokens must be at least 1, got {wanted}")
    sampling = sampling_params(
        request,
        service.sampling_defaults,
        max_tokens=tokens_left(prompt, wanted, service, None),
        logprobs=logprobs,
        structured=structured,
        reasoning_budget=reasoning_budget(reasoning, request, structured),
        model_stops=(*service.llm.llm.params.target.config.stop_token_ids, *turn_end),
        further_stop_token_ids=turn_end,
        trees=service.shows_trees and request.return_speculation,
    )
    sampling = without_bad_words(sampling, request, service)
    is_whole = structured is not None and not free
    is_closed = reasoning is not None and reasoning.closed and not request.continue_final_message
    trims = is_json or (form is not None and not free) or is_closed
    answer = AnswerForm(form, structured=is_whole, trims=trims)
    if reasoning is not None and request.separate_reasoning is not False:
        answer = dataclasses.replace(answer, reasoning=marks, inside=reasoning.inside)
    options, hidden = text_options(request), reasoning is not None and reasoning.hidden
    if form is not None or (hidden and answer.reasoning is not None):
        options = dataclasses.replace(options, skip_special=False)  # markers may be such tokens
    name = results.new_id("chatcmpl")
    return PreparedChat(
        request, service, [prompt], [sampling], options, name, answer, reasoning=reasoning
    )


async def _tool_grammar(
    service: Service,
    request: ChatRequest,
    tools: Sequence[Tool],
    structured: StructuredOutput | None,
) -> ToolGrammar:
    """What the text must look like. Raises FieldError for what does not go together."""
    if structured is not None and structured.kind not in JSON_KINDS:
        raise FieldError("tools", "tools go together with JSON: use response_format")
    use = await asyncio.to_thread(lambda: service.tool_use)
    if not use.shown:
        raise FieldError(
            "tools",
            f"the chat template of {service.name} does not show tools to the model: start the "
            "server with another one, see --chat-template",
        )
    name = service.tool_format or use.form
    if name is None:
        raise FieldError(
            "tools",
            f"the chat template of {service.name} writes calls in a format that is not known: "
            "start the server with one that the model writes, too, see --tool-format",
        )
    form = dataclasses.replace(FORMATS[name], single=FORMATS[name].single or use.single)
    return ToolGrammar(request, tools, form, structured, service.json_whitespace)


async def _compiled(service: Service, grammar: ToolGrammar) -> StructuredOutput:
    """The grammar. One that is new is compiled beside the event loop."""
    llm = service.llm.replicas[0]
    known = grammar.known(llm.llm.grammars)
    return known or await llm.compile(grammar.compiled, "tools")


def _check_together(request: ChatRequest) -> None:
    """Raise FieldError for fields that do not go together."""
    check_stream(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise FieldError("top_logprobs", "top_logprobs needs logprobs to be true")
    if request.continue_final_message and request.add_generation_prompt:
        raise FieldError(
            "continue_final_message", "continue_final_message needs add_generation_prompt false"
        )


def chat_template(service: Service, tools: bool = False) -> str:
    """The template of chats. Raises ApiError if there is none."""
    template = service.template(tools)
    if not template:
        raise ApiError(
            400,
            f"{service.name} has no chat template: use /v1/completions, or start the server with "
            "--chat-template",
            param="messages",
            code="no_chat_template",
        )
    return template


async def prompt_ids(service: Service, request: ChatRequest) -> list[int]:
    """The tokens of a conversation, up to where the answer begins."""
    template = chat_template(service, bool(request.tools) and request.tool_choice != "none")
    if len(request.messages) > service.max_length:  # each has a token at least
        raise FieldError("messages", f"too many: at most {service.max_length} tokens fit")
    off = await _reasoning_off(service, request, template)
    variables = template_variables(request, service.template_variables, off)
    use = None
    if earlier_calls(request):
        use = await asyncio.to_thread(lambda: service.tool_use)
    messages = template_messages(request.messages, use)
    most = service.max_length * MOST_CHARACTERS
    if sum(len(str(message.get("content") or "")) for message in messages) > most:
        raise FieldError("messages", f"too long: at most {service.max_length} tokens fit")
    try:
        [prompt] = await asyncio.to_thread(
            service.llm.llm.chat_prompts, messages, template, variables
        )
    except ValueError as error:
        raise FieldError("messages", str(error)) from error
    return truncated(prompt, request)


async def _reasoning_off(
    service: Service, request: ChatRequest, template: str
) -> Mapping[str, Any]:
    """The variables of a request that asks for no reasoning. Raises FieldError for a model that
    always reasons."""
    if request.reasoning_effort != "none":
        return {}
    off = await asyncio.to_thread(lambda: service.reasoning_off)
    if off is None and reasoning_format(service.reasoning_format, template) is not None:
        raise FieldError(
            "reasoning_effort",
            f"reasoning_effort none: the chat template of {service.name} cannot turn reasoning "
            "off; thinking_token_budget limits it",
        )
    return off or {}


def _message(parts: Sequence[Part]) -> ChatMessage:
    content = "".join(part.text for part in parts if part.call is None and not part.reasoning)
    reasoning = "".join(part.text for part in parts if part.reasoning) or None
    firsts = [part for part in parts if part.name is not None]
    calls = [
        ToolCall(
            id=first.id or results.new_id("call"),
            type="function",
            function=FunctionCall(
                name=first.name,
                arguments="".join(part.text for part in parts if part.call == first.call),
            ),
        )
        for first in firsts
    ]
    return ChatMessage(
        content=content or (None if calls or reasoning else ""),
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=calls or None,
    )


def _delta(part: Part) -> ChatDelta:
    if part.reasoning:
        return ChatDelta(reasoning=part.text, reasoning_content=part.text)
    if part.call is None:
        return ChatDelta(content=part.text)
    call = ToolCall(index=part.call, function=FunctionCall(name=part.name, arguments=part.text))
    if part.name is not None:
        call.id, call.type = part.id or results.new_id("call"), "function"
    return ChatDelta(tool_calls=[call])


def chat_logprobs(texts: results.TokenTexts, entries: Sequence[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            ChatLogprob(
                **_logprob(texts, entry.token_id, entry.logprob),
                top_logprobs=[TopLogprob(**_logprob(texts, *likely)) for likely in entry.top],
            )
            for entry in entries
        ]
    )


def _logprob(texts: results.TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": texts.of(token_id),
        "logprob": logprob,
        "bytes": texts.bytes_of(token_id),
    }
