"""Requests that are made to cost much, over real connections: refused, soon, and by name."""

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from jaxspec import LLM
from tests.helpers.marks import slow
from tests.helpers.served import Served, run

DEEP = "[" * 100_000 + "]" * 100_000
MANY = 10**6
ERROR = {"message", "type", "param", "code"}
LIMIT = 3  # seconds of CPU; on two healthy cores none takes one
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
PART, BLOCK = {"type": "input_text", "text": ""}, {"type": "text", "text": ""}


def body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 4, **fields}).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "a"}], **fields}).encode()


def structured(**fields: Any) -> bytes:
    return body(structured_outputs=fields)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


LARK = "start: " + " ".join(f"r{i}" for i in range(5000)) + "\n"
LARK += "\n".join(f'r{i}: "a"? "b"?' for i in range(5000))
PATTERNS = {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i}}}$"} for i in range(1, 1200)}
PATTERN = {"type": "string", "pattern": "^(a{1000}){1000}$"}
ARGUMENTS = {"type": "object", "properties": {"a": PATTERN}, "required": ["a"]}
CALL = {"type": "function", "function": {"name": "f"}}

# A path, how the body is made (collecting tests makes none), and the status.
CASES: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "50 MB": (TEXT, lambda: b"x" * 50 * 10**6, 413),
    "9 MB": (TEXT, lambda: b"x" * 9 * 10**6, 413),
    "a million tokens": (TEXT, lambda: body(prompt=[1] * MANY), 400),
    "a million words": (TEXT, lambda: body(prompt="ab " * MANY), 400),
    "a million prompts": (TEXT, lambda: body(prompt=["a"] * MANY), 400),
    "a million lists": (TEXT, lambda: body(prompt=[[1]] * MANY), 400),
    "a million words to count": (
        "/tokenize",
        lambda: json.dumps({"prompt": "ab " * MANY}).encode(),
        400,
    ),
    "a million tokens to decode": (
        "/detokenize",
        lambda: json.dumps({"tokens": [1] * MANY}).encode(),
        400,
    ),
    "a long conversation": (
        CHAT,
        lambda: chat(messages=[{"role": "user", "content": ""}] * 200_000),
        400,
    ),
    "a long message": (
        CHAT,
        lambda: chat(messages=[{"role": "user", "content": "ab " * MANY}]),
        400,
    ),
    "many parts": (
        CHAT,
        lambda: chat(
            messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 200_000}]
        ),
        400,
    ),
    "many items": (
        RESPONSES,
        lambda: json.dumps({"input": [{"role": "user", "content": ""}] * 200_000}).encode(),
        400,
    ),
    "many parts of many items": (
        RESPONSES,
        lambda: json.dumps({"input": [{"role": "user", "content": [PART] * 20}] * 9000}).encode(),
        400,
    ),
    "many blocks": (
        MESSAGES,
        lambda: chat(messages=[{"role": "user", "content": [BLOCK] * 200_000}], max_tokens=1),
        400,
    ),
    "many stops": (TEXT, lambda: body(stop=["abc"] * MANY), 400),
    "a long stop": (TEXT, lambda: body(stop="a" * 5 * MANY), 400),
    "many stop tokens": (TEXT, lambda: body(stop_token_ids=[1] * MANY), 400),
    "many biases": (TEXT, lambda: body(logit_bias={str(i): 1 for i in range(MANY // 2)}), 400),
    "many allowed": (TEXT, lambda: body(allowed_token_ids=[1] * MANY), 400),
    "a long salt": (TEXT, lambda: body(cache_salt="a" * 5 * MANY), 400),
    "a long name": (TEXT, lambda: body(model="a" * 5 * MANY), 404),
    "many fields": (TEXT, lambda: body(**{f"f{i}": 1 for i in range(MANY // 2)}), 400),
    "many tools": (CHAT, lambda: chat(tools=[CALL] * 100_000), 400),
    "deep JSON": (TEXT, lambda: f'{{"prompt": {DEEP}}}'.encode(), 400),
    "a deep hint": (TEXT, lambda: f'{{"prompt": "a", "metadata": {DEEP}}}'.encode(), 400),
    "a deep schema": (TEXT, lambda: structured(json=nested(400)), 400),
    "no UTF-8": (TEXT, lambda: b'{"prompt": "\xff\xfe"}', 400),
    "a large number": (TEXT, lambda: b'{"prompt": "a", "seed": ' + b"9" * 10**6 + b"}", 400),
    "a regex": (TEXT, lambda: structured(regex="(a{1000}){1000}"), 400),
    "a deep regex": (TEXT, lambda: structured(regex="(" * 40_000 + "a" + ")" * 40_000), 400),
    "a regex of regexes": (
        TEXT,
        lambda: structured(regex="((((a{1000}){1000}){1000}){1000}){1000}"),
        400,
    ),
    "a pattern": (TEXT, lambda: structured(json=PATTERN), 400),
    "many patterns": (
        TEXT,
        lambda: structured(json={"type": "object", "properties": PATTERNS}),
        400,
    ),
    "a grammar": (TEXT, lambda: structured(grammar=LARK), 400),
    "a grammar of regexes": (
        TEXT,
        lambda: structured(grammar="start: A\nA: /(.*a.{50})/ & /(.*b.{51})/ & ~/.*c.{40}d/"),
        400,
    ),
    "a tool's pattern": (
        CHAT,
        lambda: chat(
            tools=[
                {
                    "function": {
                        "name": "f",
                        "parameters": {
                            "type": "object",
                            "properties": {"a": PATTERN},
                            "required": ["a"],
                        },
                    }
                }
            ],
            tool_choice="required",
        ),
        400,
    ),
}


def url(address: tuple[str, int], path: str) -> str:
    return f"http://{address[0]}:{address[1]}{path}"


@pytest.fixture(scope="module")
def ready(llm: LLM) -> LLM:
    """With the programs that a tool call runs: the one above is refused while it generates, and
    programs are forgotten between files (conftest.py)."""
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"const": 1}}}}

    async def test() -> None:
        async with Served(llm) as server, server.address() as address, httpx.AsyncClient() as http:
            content = chat(tools=[{"function": function}], tool_choice="required")
            answer = await http.post(url(address, CHAT), content=content, headers=JSON, timeout=60)
            assert answer.status_code == 200

    run(test())
    return llm


@pytest.mark.parametrize("case", [slow(name) if name == "50 MB" else name for name in CASES])
def test_it_is_refused_at_once(ready: LLM, case: str):
    path, make_content, status = CASES[case]
    content = make_content()

    async def test() -> None:
        async with Served(ready) as own, own.address() as address, httpx.AsyncClient() as http:
            await http.get(url(address, "/health"))
            wall, started = time.perf_counter(), time.process_time()  # others use the CPU too
            answer = await http.post(url(address, path), content=content, headers=JSON, timeout=30)
            seconds = time.process_time() - started
            print(f"{case}: {time.perf_counter() - wall:.2f} s, {seconds:.2f} s of CPU")
            print(answer.status_code, answer.text[:200])
            assert answer.status_code == status
            fields = {"message", "type"} if path == MESSAGES else ERROR
            assert set(answer.json()["error"]) == fields
            assert len(answer.content) < 2000
            assert seconds < LIMIT

    run(test())


JSON = {"Content-Type": "application/json"}
