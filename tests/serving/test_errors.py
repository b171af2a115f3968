"""What is refused, and how: in OpenAI's shape, by name, without paths and stack traces."""

from typing import Any

import httpx
import openai
import pytest

from jaxspec import LLM
from tests.helpers.served import MODEL, Served, ask, run, with_client, with_http

TEXT = {"model": MODEL, "prompt": "abc", "max_tokens": 4}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def refuse(llm: LLM):
    """The error that a request gets, with its status."""

    def refuse(path: str, body: Any) -> tuple[int, dict[str, Any]]:
        options: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = with_http(llm, lambda http: http.post(path, **options))
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert not any(word in error["message"] for word in ("/tmp", ".py", "Traceback"))
        return answer.status_code, error

    return refuse


SET = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"colour": 1}, "colour"),
        ("completions", {"suffix": "x"}, "suffix"),
        ("completions", {"use_beam_search": True}, "use_beam_search"),
        ("completions", {"guided_json": {}}, "guided_json"),
        ("completions", {"temperature": -1}, "temperature"),
        ("completions", {"temperature": "hot"}, "temperature"),
        ("completions", {"n": 2, "temperature": 0}, "n"),
        # The types of JSON: 0 is no boolean, and "1" no number.
        ("completions", {"echo": 0}, "echo"),
        ("completions", {"top_k": 1.5}, "top_k"),
        ("completions", {"logit_bias": {"1": True}}, "logit_bias.1"),
        ("chat/completions", {"stream": "true"}, "stream"),
        ("chat/completions", {"seed": "1"}, "seed"),
        ("chat/completions", {"temperature": True}, "temperature"),
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"max_tokens": 1000}, "max_tokens"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"bad_words": ["x", " "]}, "bad_words"),
        ("chat/completions", {"bad_words": ["x" * 17]}, "bad_words"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": [1, 2, 300]}, None),
        ("completions", {"prompt": [1] * 300}, "prompt"),
        ("completions", {"logit_bias": {"400": 1}}, None),
        ("completions", {"stream": True, "best_of": 2}, "best_of"),
        ("completions", {"stream_options": {}}, "stream_options"),
        ("completions", {"response_format": {"type": "xml"}}, "response_format"),
        ("completions", {"response_format": json_schema(SET)}, "response_format"),
        ("chat/completions", {"response_format": json_schema(SET)}, "response_format"),
        ("completions", {"structured_outputs": {"json": SET}}, "structured_outputs"),
        (
            "chat/completions",
            {"tools": [{"function": {"name": "f", "parameters": SET, "strict": True}}]},
            "tools.0.function.parameters",
        ),
        ("completions", {"structured_outputs": {"regex": "("}}, None),
        (
            "completions",
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs",
        ),
        ("completions", {"allowed_token_ids": [97], "structured_outputs": {"regex": "b+"}}, None),
        ("completions", {"allowed_token_ids": [True]}, "allowed_token_ids.0"),
        ("chat/completions", {"audio": {}}, "audio"),
        ("chat/completions", {"functions": [{}]}, "functions"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"role": "x", "content": ""}]}, "messages.0.role"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
        ),
        ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
        ("chat/completions", {"chat_template": "{{ 1 }}"}, "chat_template"),
        ("chat/completions", {"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
    ],
    ids=str,
)
def test_a_bad_field_is_refused_by_name(refuse: Any, path: str, fields: Any, param: str | None):
    base = TEXT if path == "completions" else CHAT
    body = {**base, **fields}
    status, error = refuse(f"/v1/{path}", body)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        *(rb'{"prompt": "\ud800"}', b"{", b"[1]", b"", b"[" * 100_000),
    ],
    ids=["surrogate", "cut", "a list", "empty", "deep"],
)
def test_a_body_that_is_no_request_is_refused(refuse: Any, body: bytes):
    status, _ = refuse("/v1/completions", body)
    assert status == 400


def test_a_number_of_json_may_be_written_either_way(llm: LLM):
    body = {"temperature": 1, "top_p": 1, "seed": 1.0, "max_tokens": 4.0}
    ask(llm, {**CHAT, **body, "extra_body": {"logit_bias": {"7": 1}, "top_k": 5.0}})


def test_fields_of_routers_and_hints_are_tolerated(llm: LLM):
    body = {
        **{"no_stop_trim": False, "separate_reasoning": True, "stream_reasoning": True},
        **{"continue_final_message": False, "return_hidden_states": False, "logprobs": False},
        **{"skip_special_tokens": True, "ignore_eos": False, "suffix": None, "plain": None},
    }
    [answer] = ask(llm, {**TEXT, "user": "me", "extra_body": body})
    assert answer.choices[0].text


def test_a_tiny_temperature_is_none(llm: LLM):
    first, second = ask(llm, *({**TEXT, "temperature": own} for own in (0, 1e-38)))
    assert first.choices[0].text == second.choices[0].text


def test_another_model_is_not_found(llm: LLM):
    async def test(client: Any) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.completions.create(**{**TEXT, "model": "other"})
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        assert [card.id async for card in client.models.list()] == [MODEL]

    with_client(llm, test)


def test_a_large_body_is_refused(llm: LLM):
    async def pieces():
        for _ in range(10):
            yield b" " * 200

    async def test(http: httpx.AsyncClient) -> None:
        for content in (b" " * 2000, pieces()):
            answer = await http.post("/v1/completions", content=content)
            assert answer.status_code == 413

    with_http(llm, test, max_body=1000)


def test_a_full_queue_is_429(llm: LLM):
    async def test() -> None:
        async with Served(llm) as server, server.client() as client:
            many = {**TEXT, "max_tokens": 100, "prompt": ["abc"] * 100, "temperature": 0}
            with pytest.raises(openai.RateLimitError) as caught:
                await client.completions.create(**many)
            assert caught.value.response.headers["Retry-After"]
            assert "admission_rejections_total" in server.metrics.text().decode()
            assert (await client.completions.create(**TEXT)).choices

    run(test())


def test_a_time_limit_is_504(llm: LLM):
    async def test(http: httpx.AsyncClient) -> None:
        answer = await http.post("/v1/completions", json=TEXT)
        assert answer.status_code == 504
        answer = await http.post("/v1/completions", json={**TEXT, "stream": True})
        assert answer.status_code in (200, 504) and "took too long" in answer.text

    with_http(llm, test, request_timeout=1e-9)


def test_before_it_is_ready_it_says_so(llm: LLM):
    async def test() -> None:
        server = Served(llm)
        async with server.http() as http:
            assert (await http.get("/health")).status_code == 503
            answer = await http.post("/v1/completions", json=TEXT)
            assert answer.status_code == 503 and answer.headers["Retry-After"]
            assert (await http.get("/version")).status_code == 200
            assert (await http.get("/metrics")).status_code == 200
            assert (await http.get("/nothing")).json()["error"]["type"]

    run(test())


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("completions", {"prompt": {}}, "prompt: Input should be text, token ids, or a list of"),
        ("completions", {"prompt": [1, "a"]}, "prompt.1: Input should be a valid integer"),
        ("completions", {"prompt": ["a", [1]]}, "prompt.1: Input should be a valid string"),
        ("completions", {"prompt": [[1], ["a"]]}, "prompt.1.0: Input should be a valid integer"),
        ("completions", {"stop": 5}, "stop: Input should be text, or a list of texts"),
        ("chat/completions", {"stop": ["a", None]}, "stop.1: Input should be a valid string"),
        ("chat/completions", {"stop": ["a"] * 65}, "stop: List should have at most 64 items"),
        ("chat/completions", {"tool_choice": 5}, "tool_choice: Input should be 'none', 'auto'"),
        ("chat/completions", {"response_format": 5}, "response_format: Input should be a valid d"),
        (
            "completions",
            {"structured_outputs": {"json": 5}},
            "structured_outputs.json: Input should be an object, or the text of one",
        ),
        (
            "completions",
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs: exactly one of json, regex, choice, grammar, json_object must be "
            "given, got json and regex",
        ),
        (
            "completions",
            {"structured_outputs": {"regex": "a"}, "ignore_eos": True},
            "ignore_eos cannot be with a structured output or a forced tool call",
        ),
        (
            "completions",
            {"bad_words": ["xy"], "policy_logprobs": True},
            "bad_words: policy_logprobs cannot be with bad_words",
        ),
    ],
)
def test_of_fields_of_several_shapes_the_real_reason_is_told(
    refuse: Any, path: str, fields: dict[str, Any], message: str
):
    body = {**(TEXT if path == "completions" else CHAT), **fields}
    status, error = refuse(f"/v1/{path}", body)
    assert status == 400 and error["message"].startswith(message)
    assert ";" not in error["message"], "of a shape that the value does not have, too"
