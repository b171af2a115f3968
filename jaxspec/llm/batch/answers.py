"""From a line of a file of prompts to its result."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.engine.generation import TokenLogprob
from jaxspec.llm.async_llm import AsyncTexts
from jaxspec.llm.batch.requests import BatchRequest, line_id, read_request
from jaxspec.llm.completion import Completion, generated_tokens
from jaxspec.llm.tokenizer.prompts import Prompt


@dataclasses.dataclass(frozen=True)
class Answers:
    """Answers lines.

    Attributes:
      sampling: of lines that say nothing else.
      chat_template: a Jinja template; None: the model's own.
      token_ids: results have the token ids of prompt and text.
    """

    llm: AsyncTexts
    sampling: SamplingParams
    chat_template: str | None = None
    token_ids: bool = False

    async def answer(self, index: int, line: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a line; one with an ``error`` if the line cannot be served."""
        result: dict[str, Any] = {"id": None}
        try:
            result["id"] = line_id(line)
            request = read_request(index, line, self.sampling)
            prompt, sampling = self._prompt(request)
            completions = await self.llm.generate([prompt], sampling)
        except ValueError as error:
            message = " ".join(str(error).split()).replace("prompt 0 ", "the prompt ", 1)
            return result | {"error": message}
        return result | self._result(completions)

    def _prompt(self, request: BatchRequest) -> tuple[Prompt, SamplingParams]:
        if request.messages is None:
            assert request.prompt is not None
            return request.prompt, request.sampling
        llm = self.llm.llm
        [prompt] = llm.chat_prompts([request.messages], self.chat_template)
        return prompt, request.sampling.ending_at(llm.turn_end(self.chat_template))

    def _result(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Several samples are ``choices``."""
        prompt = completions[0].prompt_token_ids
        generated = generated_tokens(completions)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": generated,
            "total_tokens": len(prompt) + generated,
        }
        choices = [self._choice(completion) for completion in completions]
        result: dict[str, Any] = choices[0] if len(choices) == 1 else {"choices": choices}
        result["usage"] = usage
        if self.token_ids:
            result["prompt_token_ids"] = prompt
        if completions[0].prompt_logprobs is not None:
            result["prompt_logprobs"] = list(map(_logprob, completions[0].prompt_logprobs))
        errors = [completion.error for completion in completions if completion.error is not None]
        return result | ({"error": errors[0]} if errors else {})

    def _choice(self, completion: Completion) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "seed": completion.seed,
        }
        if self.token_ids:
            choice["token_ids"] = completion.token_ids
        if completion.logprobs is not None:
            choice["logprobs"] = list(map(_logprob, completion.logprobs))
        if completion.policy_logprobs is not None:
            choice["policy_logprobs"] = completion.policy_logprobs
        return choice


def _logprob(entry: TokenLogprob | None) -> dict[str, Any] | None:
    return None if entry is None else entry._asdict()
