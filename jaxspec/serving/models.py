"""`/v1/models`."""

from jaxspec.serving.protocol.models import ModelCard, ModelList, StopToken
from jaxspec.serving.service import Service


def model_list(service: Service) -> ModelList:
    """The names of the one model that is served."""
    length, stops = service.max_length, stop_tokens(service)
    return ModelList(
        data=[
            ModelCard(id=name, created=service.created, max_model_len=length, stop_tokens=stops)
            for name in service.names
        ]
    )


def stop_tokens(service: Service) -> list[StopToken]:
    """The model's stop tokens, and the token that ends a turn of chats."""
    llm, turn_end = service.llm.llm, service.turn_end()
    return [
        StopToken(id=token, text=llm.detokenize([token]), chats_only=token in turn_end)
        for token in (*llm.params.target.config.stop_token_ids, *turn_end)
    ]
