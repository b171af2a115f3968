"""The field ``bad_words``: texts that an answer must not contain."""

import dataclasses

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.llm.tokenizer.bad_words import word_sequences
from jaxspec.serving.protocol.base import FieldError
from jaxspec.serving.protocol.sampling import SamplingFields
from jaxspec.serving.sampling import in_words_of_requests
from jaxspec.serving.service import Service

FIELD = "bad_words"


def without_bad_words(
    sampling: SamplingParams, request: SamplingFields, service: Service
) -> SamplingParams:
    """``sampling`` that keeps the request's ``bad_words`` out of the text.

    Raises FieldError for words that are empty or too long.
    """
    if not request.bad_words:
        return sampling
    try:
        sequences = word_sequences(service.llm.llm.tokenizer, request.bad_words)
        return dataclasses.replace(
            sampling,
            bad_token_ids=tuple(ids[0] for ids in sequences if len(ids) == 1),
            bad_sequences=tuple(ids for ids in sequences if len(ids) > 1),
        )
    except ValueError as error:
        problem = in_words_of_requests(error).removeprefix(f"{FIELD} ")
        raise FieldError(FIELD, f"{FIELD}: {problem}") from error
