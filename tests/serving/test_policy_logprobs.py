"""Log-probabilities under the policy that sampled, over HTTP: what trainers put into a loss."""

import json
from typing import Any

import httpx
import numpy as np
import pytest

from jaxspec import LLM, forward
from tests.helpers.marks import slow
from tests.helpers.served import MODEL, with_http

SAMPLED = {"model": MODEL, "max_tokens": 12, "temperature": 0.7, "top_k": 20, "seed": 3}
ASKED = {**SAMPLED, "policy_logprobs": True, "return_token_ids": True}
OF_PATH = {
    "/v1/completions": {"prompt": "abcabcabc"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abcabc"}]},
}


def of_policy(llm: LLM, prompt: list[int], written: list[int]) -> np.ndarray:
    """log_softmax of the 20 likeliest logits / 0.7, at each token that was written."""
    tokens = np.array([[*prompt, *written]], np.int32)
    logits = np.asarray(forward(llm.params.target, tokens), np.float64)[0, len(prompt) - 1 : -1]
    scaled = logits / 0.7
    least = np.sort(scaled, axis=-1)[:, -20, None]
    kept = np.where(scaled >= least, scaled, -np.inf)
    total = np.log(np.exp(kept - kept.max(-1, keepdims=True)).sum(-1)) + kept.max(-1)
    return kept[np.arange(len(written)), written] - total


# Completions take the same values from the same programs.
@pytest.mark.parametrize("path", [slow("/v1/completions"), "/v1/chat/completions"])
def test_they_are_those_of_the_tokens_whole_and_streamed(llm: LLM, path: str):
    async def test(http: httpx.AsyncClient) -> tuple[Any, Any, Any]:
        request = {**OF_PATH[path], **ASKED}
        whole = (await http.post(path, json=request)).json()
        silent = (await http.post(path, json={**request, "policy_logprobs": False})).json()
        stream = (await http.post(path, json={**request, "stream": True})).text
        *events, _ = stream.removesuffix("\n\n").split("\n\n")
        return whole, silent, [json.loads(event.removeprefix("data: ")) for event in events]

    whole, silent, chunks = with_http(llm, test)
    [choice] = whole["choices"]
    expected = of_policy(llm, choice["prompt_token_ids"], choice["token_ids"])
    assert len(expected) == 12
    np.testing.assert_allclose(choice["policy_logprobs"], expected, atol=1e-4)
    parts = [part for chunk in chunks for part in chunk["choices"]]
    streamed = [value for part in parts for value in part.get("policy_logprobs") or ()]
    np.testing.assert_allclose(streamed, choice["policy_logprobs"], atol=1e-6)
    assert [token for part in parts for token in part.get("token_ids") or ()] == choice["token_ids"]
    [other] = silent["choices"]
    assert other["token_ids"] == choice["token_ids"] and "policy_logprobs" not in other


def test_what_no_policy_has_is_refused(llm: LLM):
    async def test(http: httpx.AsyncClient) -> httpx.Response:
        request = {**OF_PATH["/v1/completions"], **ASKED, "presence_penalty": 0.5}
        return await http.post("/v1/completions", json=request)

    answer = with_http(llm, test)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "policy_logprobs"
    assert "cannot be with presence_penalty" in error["message"]
