"""`/tokenize` and `/detokenize`."""

from jaxspec.serving.chat import prompt_ids
from jaxspec.serving.protocol.base import FieldError
from jaxspec.serving.protocol.chat import ChatRequest
from jaxspec.serving.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from jaxspec.serving.sampling import check_length
from jaxspec.serving.service import Service


async def tokenize(service: Service, request: TokenizeRequest) -> TokenizeResponse:
    """The tokens of a prompt, or of a chat. Raises FieldError for neither and for both."""
    service.check(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise FieldError("prompt", "give prompt or messages")
    if request.prompt is not None:
        check_length("prompt", request.prompt, service.max_length)
        [tokens] = await service.llm.tokenize([request.prompt])
    else:
        generation = request.add_generation_prompt
        fields = {"messages": request.messages, "add_generation_prompt": generation}
        chat = ChatRequest.model_validate(fields)
        tokens = await prompt_ids(service, chat)
    texts = [service.texts.of(token) for token in tokens] if request.return_token_strs else None
    length = service.max_length
    return TokenizeResponse(
        tokens=tokens, count=len(tokens), max_model_len=length, token_strs=texts
    )


async def detokenize(service: Service, request: DetokenizeRequest) -> DetokenizeResponse:
    """The text of tokens, special ones included. Raises FieldError for unknown tokens, and for more
    than a text may have."""
    service.check(request.model)
    check_length("tokens", request.tokens, service.max_length)
    most = service.llm.llm.params.target.config.vocab_size
    if any(token >= most for token in request.tokens):
        raise FieldError("tokens", f"tokens has one outside 0..{most - 1}")
    return DetokenizeResponse(prompt=service.llm.llm.detokenize(request.tokens))
