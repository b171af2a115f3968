"""`/v1/models`."""

from jaxspec.serving.protocol.models import ModelCard, ModelList
from jaxspec.serving.service import Service


def model_list(service: Service) -> ModelList:
    """The names of the one model that is served."""
    length = service.max_length
    return ModelList(
        data=[
            ModelCard(id=name, created=service.created, max_model_len=length)
            for name in service.names
        ]
    )
