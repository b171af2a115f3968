"""How long requests may be, and what people are told of it."""

import dataclasses

import pytest

from jaxspec import LLM
from jaxspec.engine import memory
from jaxspec.llm import request_length
from jaxspec.llm.options import LLMOptions
from jaxspec.llm.request_length import length_text


def test_as_many_tokens_as_fit_the_memory(byte_llm: LLM):
    """One token more does not fit."""
    params = byte_llm.params
    most = memory.most_tokens(params, 8, 1, 2**22)
    assert most is not None and most > 100
    for tokens, fits in ((most, True), (most + 8, False)):
        cache = dataclasses.replace(byte_llm.engine.cache, max_length=tokens, memory=2**22)
        if fits:
            assert memory.num_pages(params, cache, 1) > tokens // 8
        else:
            with pytest.raises(ValueError, match="too small"):
                memory.num_pages(params, cache, 1)
    assert memory.most_tokens(params, 8, 1, 1) == 0


def test_on_a_cpu_the_default_is_bounded(byte_llm: LLM):
    config = dataclasses.replace(byte_llm.params.target.config, max_position=8192)
    target = dataclasses.replace(byte_llm.params.target, config=config)
    params = byte_llm.params.replace(target=target)
    lengths = [
        request_length.request_length(LLMOptions(max_length=length), params)
        for length in ("model", None, 4096)
    ]
    assert lengths == [2048, 2048, 4096]
    told = length_text(None, 2048, config)
    assert "2048 tokens" in told and "--max-length 8192" in told
    assert "as fit the memory; the model allows 8192" in length_text(None, 5000, config)
    assert "as --max-length says" in length_text(100, 100, config)
    assert length_text(None, 8192, config).endswith("the most that the model allows")
