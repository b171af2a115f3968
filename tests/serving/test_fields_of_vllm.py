"""vLLM's fields and paths, one by one: each does what the page says, or is refused by name."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxspec import LLM
from jaxspec.serving import chat, completions
from jaxspec.serving.anthropic import prepare as messages
from jaxspec.serving.protocol.chat import ChatRequest
from jaxspec.serving.protocol.completions import CompletionRequest
from jaxspec.serving.protocol.messages import MessagesRequest
from jaxspec.serving.protocol.responses import ResponsesRequest
from jaxspec.serving.responses import prepare as responses
from jaxspec.serving.responses.store import ResponseStore
from jaxspec.serving.service import Service
from tests.helpers.events import read_events
from tests.helpers.served import Served, run, with_http
from tests.helpers.vllm_cases import CASES, HINTS, LEAST, REFUSED, TOOLS, USER, Reached
from tests.helpers.vllm_fields import FIELDS, PATHS

PAGE = Path(__file__).parent.parent.parent / "docs" / "vllm.md"
URLS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
# It reasons, and shows tools and further variables.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ (tool.function or tool).name }};{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{{ reasoning_effort }}{{ mood }}{% if add_generation_prompt %}<assistant><think>{% endif %}"
    "{# </think> #}"
)
# Fields that are seen in answers alone, see the tests of streams and tokens.
IN_ANSWERS = {
    "completions": {"model", "stream", "stream_options", "return_token_ids"},
    "chat": {"model", "stream", "stream_options", "return_token_ids"},
    "responses": {"model", "stream", "previous_response_id"},
    "messages": {"model", "stream"},
    "count_tokens": FIELDS["count_tokens"],
    "tokenize": FIELDS["tokenize"] - set(REFUSED["tokenize"]),
    "detokenize": FIELDS["detokenize"],
}


async def reached(service: Service, api: str, body: dict[str, Any]) -> Reached:
    match api:
        case "completions":
            return Reached(
                await completions.prepare(service, CompletionRequest.model_validate(body))
            )
        case "chat":
            return Reached(await chat.prepare(service, ChatRequest.model_validate(body)))
        case "responses":
            request = ResponsesRequest.model_validate(body)
            writer = await responses.prepare(service, ResponseStore(), "", request)
            return Reached(writer.prepared, writer.whole())
    writer = await messages.prepare(service, MessagesRequest.model_validate(body), None)
    return Reached(writer.prepared)


@pytest.mark.parametrize("api", CASES)
def test_each_field_reaches_the_engine(llm: LLM, api: str):
    async def test() -> None:
        async with Served(llm, chat_template=TEMPLATE) as server:
            for name, case in CASES[api].items():
                least = {**LEAST[api], **case.more}
                if name == "max_completion_tokens":
                    del least["max_tokens"]
                plain = await reached(server.service, api, least)
                found = await reached(server.service, api, {**least, name: case.value})
                changed = found.changed(plain)
                assert case.check(found, plain), f"{name}: changed {changed or 'nothing'}"
            plain = await reached(server.service, api, LEAST[api])
            hinted = await reached(server.service, api, {**LEAST[api], **HINTS[api]})
            assert not hinted.changed(plain)

    run(test())


def test_what_there_is_not_is_refused_by_name(llm: LLM):
    async def test(http: httpx.AsyncClient) -> None:
        for api, fields in REFUSED.items():
            least = LEAST.get(api, {"messages": [USER]})
            for name, value in fields.items():
                answer = await http.post(URLS[api], json={**least, name: value})
                assert answer.status_code == 400, f"{api}: {name}: {answer.text}"
                error = answer.json()["error"]
                assert name in error["message"], f"{api}: {name}: {error}"
                assert error.get("param", name) == name

    with_http(llm, test, chat_template=TEMPLATE)


# Values, and parts of them, that the page says are refused.
PARTS: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"structured_outputs": {"structural_tag": "{}"}}, "structural_tag"),
    (
        "chat",
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "whitespace_pattern",
    ),
    (
        "chat",
        {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
        "disable_additional_properties",
    ),
    ("chat", {"response_format": {"type": "structural_tag", "structures": []}}, "structural_tag"),
    ("chat", {"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
    ("chat", {"tools": [{**TOOLS["chat"][0], "defer_loading": True}]}, "tools.0.defer_loading"),
    ("responses", {"include": ["file_search_call.results"]}, "include"),
    (
        "responses",
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input_image",
    ),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
    ("completions", {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
]


def test_parts_of_fields_are_refused_by_name(llm: LLM):
    async def test(http: httpx.AsyncClient) -> None:
        for api, fields, name in PARTS:
            answer = await http.post(URLS[api], json={**LEAST[api], **fields})
            assert answer.status_code == 400 and name in answer.json()["error"]["message"], fields

    with_http(llm, test, chat_template=TEMPLATE)


@pytest.mark.parametrize("api", LEAST)
def test_all_that_is_wrong_is_told_at_once(llm: LLM, api: str):
    wrong = {"temperature": -1, "top_p": 3, "stream": 7, "nonsense": 1, "vllm_xargs": {"a": 1}}

    async def test(http: httpx.AsyncClient) -> str:
        answer = await http.post(URLS[api], json={**LEAST[api], **wrong})
        return answer.json()["error"]["message"]

    message = with_http(llm, test, chat_template=TEMPLATE)
    assert all(name in message for name in wrong), message


def test_another_model_is_refused_everywhere(llm: LLM):
    least = {"tokenize": {"prompt": "a"}, "detokenize": {"tokens": [7]}}
    least["count_tokens"] = {"messages": [USER]}

    async def test(http: httpx.AsyncClient) -> None:
        for api, url in URLS.items():
            body = {**LEAST.get(api, {}), **least.get(api, {}), "model": "other"}
            answer = await http.post(url, json=body)
            assert answer.status_code == 404 and "'other'" in answer.json()["error"]["message"]

    with_http(llm, test, chat_template=TEMPLATE)


def test_streams_and_ids_of_tokens(llm: LLM):
    async def test(http: httpx.AsyncClient) -> None:
        for api in ("completions", "chat"):
            body = {**LEAST[api], "temperature": 0, "return_token_ids": True}
            [choice] = (await http.post(URLS[api], json=body)).json()["choices"]
            assert len(choice["token_ids"]) == 4 and choice["prompt_token_ids"]
            options = {"stream_options": {"include_usage": True}}
            answer = await http.post(URLS[api], json={**body, "stream": True, **options})
            *_, last, done, end = answer.text.split("\n\n")
            assert '"usage":{"prompt_tokens"' in last and done == "data: [DONE]" and not end
        for api in ("responses", "messages"):
            answer = await http.post(URLS[api], json={**LEAST[api], "stream": True})
            assert len(read_events(answer.text)) > 3
        first = (await http.post(URLS["responses"], json=LEAST["responses"])).json()
        more = {**LEAST["responses"], "previous_response_id": first["id"]}
        second = (await http.post(URLS["responses"], json=more)).json()
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]

    with_http(llm, test, chat_template=TEMPLATE)


def test_tokens_are_those_of_the_requests(llm: LLM):
    chats = {"messages": [USER]}

    async def test(http: httpx.AsyncClient) -> None:
        async def count(api: str, **body: Any) -> int:
            answer = (await http.post(URLS[api], json=body)).json()
            return answer["count" if api == "tokenize" else "input_tokens"]

        plain = await count("tokenize", **chats)
        assert await count("tokenize", **chats, tools=TOOLS["chat"]) > plain
        assert await count("tokenize", **chats, chat_template_kwargs={"mood": "glad"}) == plain + 4
        assert await count("tokenize", **chats, add_generation_prompt=False) < plain
        goes_on = {"add_generation_prompt": False, "continue_final_message": True}
        said = {"messages": [USER, {"role": "assistant", "content": "ab"}]}
        whole = await count("tokenize", **said, add_generation_prompt=False)
        assert await count("tokenize", **said, **goes_on) < whole
        answer = await http.post("/tokenize", json={"prompt": "ab", "return_token_strs": True})
        assert answer.json()["token_strs"] == ["a", "b"]
        ids = answer.json()["tokens"]
        assert (await http.post("/detokenize", json={"tokens": ids})).json() == {"prompt": "ab"}
        special = {"prompt": "ab", "add_special_tokens": False}
        assert (await http.post("/tokenize", json=special)).json()["tokens"] == ids
        for name, value in {**goes_on, "tools": TOOLS["chat"], "chat_template_kwargs": {}}.items():
            answer = await http.post("/tokenize", json={"prompt": "ab", name: value})
            assert answer.json()["error"]["param"] == name

        plain = await count("count_tokens", **chats)
        for more in (
            {"system": "be brief"},
            {"tools": TOOLS["messages"]},
            {"chat_template_kwargs": {"mood": "glad"}},
            {"output_config": {"effort": "low"}},
        ):
            assert await count("count_tokens", **chats, **more) > plain, more
        tools = {**chats, "tools": TOOLS["messages"], "tool_choice": {"type": "none"}}
        assert await count("count_tokens", **tools) == plain
        thinking = {"chat_template_kwargs": {"mood": "glad"}, "thinking": {"type": "disabled"}}
        assert await count("count_tokens", **chats, **thinking) == plain + 4

    with_http(llm, test, chat_template=TEMPLATE)


def test_each_path_is_there_or_gives_404_in_our_shape(llm: LLM):
    _, paths, _ = tables()
    missing = {path for path, (mark, _) in paths.items() if mark == "no"}

    async def test(http: httpx.AsyncClient) -> None:
        for path in paths:
            method, url = path.split()
            headers = {"Authorization": "Bearer admin"}
            answer = await http.request(method, url.replace("{id}", "a"), headers=headers, json={})
            error = answer.json().get("error", {}) if answer.status_code >= 400 else {}
            told = f"there is no {method} {url.replace('{id}', 'a')}"
            assert (error.get("message") == told) == (path in missing), f"{path}: {answer.text}"
            if path in missing:
                assert answer.status_code in (404, 405)

    with_http(llm, test, chat_template=TEMPLATE, admin_key="admin")


def test_requests_under_way_are_counted_and_aborted(llm: LLM):
    body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": True}
    key: Any = {"headers": {"Authorization": "Bearer admin"}}

    async def test() -> None:
        async with Served(llm, admin_key="admin") as server, server.address() as (host, port):
            url = f"http://{host}:{port}"
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                assert (await http.get("/load")).json() == {"server_load": 0}
                async with http.stream("POST", "/v1/completions", json=body) as answer:
                    lines = answer.aiter_lines()
                    await anext(lines)
                    assert (await http.get("/load")).json() == {"server_load": 1}
                    found = await http.post("/abort_requests", json={}, **key)
                    assert found.json() == {"status": "aborted", "aborted": 1}
                    rest = [line async for line in lines]
                assert any('"finish_reason":"abort"' in line for line in rest)
                one = await http.post("/abort_requests", json={"request_ids": ["a"]}, **key)
                assert one.json()["error"]["param"] == "request_ids"
                again = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
                assert again.status_code == 200
                assert (await http.get("/weight_info", **key)).json() == {
                    "weight_version": "default"
                }

    run(test())


def tables() -> tuple[dict[str, dict[str, str]], dict[str, tuple[str, str]], list[str]]:
    """Of the page: what is said of each API's fields, of the paths, and the APIs."""
    text = PAGE.read_text(encoding="utf-8")
    apis = re.findall(r"`(\w+)`", next(line for line in text.splitlines() if "| field |" in line))
    fields: dict[str, dict[str, str]] = {api: {} for api in apis}
    paths: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        found = re.findall(r"`([^`]+)`", cells[0]) if line.startswith("| `") else []
        if not found:
            continue
        if "/" in found[0]:
            paths |= {path: (cells[1], cells[2]) for path in found}
            continue
        for name in found:
            marks = zip(apis, cells[1:], strict=False)
            for api, mark in marks:
                if mark:
                    fields[api][name] = mark
    return fields, paths, apis


def test_the_page_says_what_is_tested():
    fields, paths, apis = tables()
    assert set(apis) == set(FIELDS) and set(paths) == set(PATHS)
    for api in apis:
        refused, hints = set(REFUSED.get(api, {})), set(HINTS.get(api, {}))
        have = set(CASES.get(api, {})) | set(IN_ANSWERS[api])
        said = {
            mark: {f for f, m in fields[api].items() if m == mark} for mark in ("yes", "–", "no")
        }
        assert said == {"yes": have, "–": hints, "no": refused}, api
        assert have | hints | refused == FIELDS[api], api
