"""A server whose model is a tokenizer and nothing else: it prepares requests."""

import asyncio
import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import transformers

from jaxspec.engine.generation import new_grammar
from jaxspec.engine.structured import GrammarCompiler
from jaxspec.llm import tokenizer as tokenizing
from jaxspec.serving.chat import PreparedChat, prepare, prompt_ids
from jaxspec.serving.protocol.chat import ChatRequest
from jaxspec.serving.service import Service

MOST_STOPS = 16  # tokens at which a row may stop


class Tokenizing:
    """Does of an LLM and an AsyncLLM what needs no weights.

    Args:
      stop: the token that ends a text.
    """

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase, stop: str):
        self.tokenizer, self.llm, self.replicas = tokenizer, self, [self]
        self.stop = tokenizer.get_vocab()[stop]
        config = types.SimpleNamespace(stop_token_ids=(self.stop,), vocab_size=len(tokenizer))
        target = types.SimpleNamespace(config=config)
        self.params = types.SimpleNamespace(target=target)
        cache = types.SimpleNamespace(max_length=4096)
        options = types.SimpleNamespace(trees=False)
        self.engine = types.SimpleNamespace(cache=cache, config=options)

    @functools.cached_property
    def grammars(self) -> GrammarCompiler:
        text = tokenizing.tokenizer_json(self.tokenizer)
        return GrammarCompiler(text, len(self.tokenizer), [self.stop])

    def chat_prompts(self, messages: Any, template: str, variables: Any) -> list[list[int]]:
        return tokenizing.tokenize_chats(self.tokenizer, messages, template, variables)

    def tokenize(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        return [self.tokenizer(text, add_special_tokens=special)["input_ids"] for text in texts]

    def detokenize(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special))

    def turn_end(self, chat_template: str | None) -> tuple[int, ...]:
        found = tokenizing.turn_end(self.tokenizer, chat_template)
        return tuple(token for token in found if token != self.stop)

    async def compile(self, compiled: Any, _: str) -> Any:
        return compiled(self.grammars)


class Prepares:
    """Prepares chats as the server does."""

    def __init__(self, llm: Tokenizing, template: str):
        self.llm, own = llm, llm
        anything: Any = own
        self.service = Service(("published",), chat_template=template, state="ready")
        self.service._llm = anything

    def request(self, body: Mapping[str, Any]) -> PreparedChat:
        return asyncio.run(prepare(self.service, ChatRequest.model_validate(body)))

    def prompt(self, body: Mapping[str, Any]) -> list[int]:
        return asyncio.run(prompt_ids(self.service, ChatRequest.model_validate(body)))

    def refused(self, chat: PreparedChat, text: Sequence[int]) -> int | None:
        """The number of the first token that may not come, as the engine would have it; None: the
        whole text may be the answer."""
        [sampling] = chat.sampling
        stops = {self.llm.stop, *sampling.further_stop_token_ids}
        grammar = new_grammar(sampling, self.llm.grammars.matcher, stops, MOST_STOPS)
        assert grammar is not None
        for place, token in enumerate([*text, self.llm.stop]):
            phases = grammar.phases
            if phases is None or phases.masked:
                mask = grammar.follow(text[:place]).mask()
                if not mask[token // 32] >> np.uint32(token % 32) & 1:
                    return place
            if phases is not None and token in phases.pauses:
                phases.pass_pause([*text[:place], token])
        return None
