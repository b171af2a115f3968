"""The publisher's way to sample, as the server's default."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxspec import LLM
from jaxspec.serving.generation_config import as_text, sampling_defaults
from jaxspec.serving.protocol.completions import CompletionRequest
from jaxspec.serving.sampling import sampling_params
from tests.helpers.served import MODEL, ask

# Qwen/Qwen3-8B and meta-llama/Llama-3.1-8B-Instruct, as published.
QWEN3 = {
    "bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643],
    "pad_token_id": 151643, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
    "transformers_version": "4.51.0",
}  # fmt: skip
LLAMA = {
    "bos_token_id": 128000, "do_sample": True, "eos_token_id": [128001, 128008, 128009],
    "temperature": 0.6, "top_p": 0.9, "transformers_version": "4.42.3",
}  # fmt: skip
GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "max_length": 4096}


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (QWEN3, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        (LLAMA, {"temperature": 0.6, "top_p": 0.9}),
        (GREEDY, {}),
        ({"top_k": -1}, {"top_k": 0}),
        (None, {}),
    ],
)
def test_published_files_are_read(content: Any, found: dict[str, Any], tmp_path: Path):
    if content is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert sampling_defaults(tmp_path) == found


def test_a_value_out_of_range_is_an_error_that_says_what_to_do(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ValueError, match=r"generation_config.json: top_p .*--generation-config"):
        sampling_defaults(tmp_path)


def test_a_request_has_the_last_word():
    defaults = sampling_defaults_of(QWEN3)
    for asked, expected in (
        ({}, (0.6, 0.95, 20)),
        ({"temperature": 0, "top_k": -1}, (0.0, 0.95, 0)),
        ({"top_p": 1.0}, (0.6, 1.0, 20)),
    ):
        request = CompletionRequest.model_validate({"prompt": "a", **asked})
        params = sampling_params(
            request, defaults, max_tokens=4, logprobs=None, structured=None, model_stops=()
        )
        assert (params.temperature, params.top_p, params.top_k) == expected
    assert as_text(defaults) == "temperature 0.6, top_p 0.95, top_k 20"


def sampling_defaults_of(content: dict[str, Any]) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k")
    return {name: content[name] for name in names}


def test_texts_of_both_endpoints_are_sampled_so(llm: LLM):
    prompt = {"model": MODEL, "prompt": "abcab", "max_tokens": 8, "seed": 1}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    asked = ask(llm, prompt | {"temperature": 0}, chat | {"temperature": 0, "seed": 1})
    found = ask(llm, prompt, chat | {"seed": 1}, sampling_defaults={"temperature": 0.0})
    assert found[0].choices[0].text == asked[0].choices[0].text
    assert found[1].choices[0].message.content == asked[1].choices[0].message.content
