"""Requests that are made to cost much, over real connections: refused, soon, and by name."""

import json
import time
from typing import Any

import httpx
import pytest

from jaxspec import LLM
from tests.helpers.served import Served, run

DEEP = "[" * 100_000 + "]" * 100_000
MANY = 10**6
LIMIT = 3  # seconds of CPU; on two healthy cores none takes one
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


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

# A path, a body and the status.
CASES = {
    "50 MB": (TEXT, b"x" * 50 * 10**6, 413),
    "a million tokens": (TEXT, body(prompt=[1] * MANY), 400),
    "a million words": (TEXT, body(prompt="ab " * MANY), 400),
    "a million prompts": (TEXT, body(prompt=["a"] * MANY), 400),
    "a million lists": (TEXT, body(prompt=[[1]] * MANY), 400),
    "a million words to count": ("/tokenize", json.dumps({"prompt": "ab " * MANY}).encode(), 400),
    "a million tokens to decode": ("/detokenize", json.dumps({"tokens": [1] * MANY}).encode(), 400),
    "a long conversation": (CHAT, chat(messages=[{"role": "user", "content": ""}] * 200_000), 400),
    "a long message": (CHAT, chat(messages=[{"role": "user", "content": "ab " * MANY}]), 400),
    "many parts": (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 200_000}]),
        400,
    ),
    "many stops": (TEXT, body(stop=["abc"] * MANY), 400),
    "a long stop": (TEXT, body(stop="a" * 5 * MANY), 400),
    "many stop tokens": (TEXT, body(stop_token_ids=[1] * MANY), 400),
    "many biases": (TEXT, body(logit_bias={str(i): 1 for i in range(MANY // 2)}), 400),
    "many allowed": (TEXT, body(allowed_token_ids=[1] * MANY), 400),
    "a long salt": (TEXT, body(cache_salt="a" * 5 * MANY), 400),
    "a long name": (TEXT, body(model="a" * 5 * MANY), 404),
    "many fields": (TEXT, body(**{f"f{i}": 1 for i in range(MANY // 2)}), 400),
    "many tools": (CHAT, chat(tools=[CALL] * 100_000), 400),
    "deep JSON": (TEXT, f'{{"prompt": {DEEP}}}'.encode(), 400),
    "a deep hint": (TEXT, f'{{"prompt": "a", "metadata": {DEEP}}}'.encode(), 400),
    "a deep schema": (TEXT, structured(json=nested(400)), 400),
    "no UTF-8": (TEXT, b'{"prompt": "\xff\xfe"}', 400),
    "a large number": (TEXT, b'{"prompt": "a", "seed": ' + b"9" * 10**6 + b"}", 400),
    "a regex": (TEXT, structured(regex="(a{1000}){1000}"), 400),
    "a deep regex": (TEXT, structured(regex="(" * 40_000 + "a" + ")" * 40_000), 400),
    "a regex of regexes": (TEXT, structured(regex="((((a{1000}){1000}){1000}){1000}){1000}"), 400),
    "a pattern": (TEXT, structured(json=PATTERN), 400),
    "many patterns": (TEXT, structured(json={"type": "object", "properties": PATTERNS}), 400),
    "a grammar": (TEXT, structured(grammar=LARK), 400),
    "a grammar of regexes": (
        TEXT,
        structured(grammar="start: A\nA: /(.*a.{50})/ & /(.*b.{51})/ & ~/.*c.{40}d/"),
        400,
    ),
    "a tool's pattern": (
        CHAT,
        chat(
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


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_at_once(ready: LLM, case: str):
    path, content, status = CASES[case]

    async def test() -> None:
        async with Served(ready) as own, own.address() as address, httpx.AsyncClient() as http:
            await http.get(url(address, "/health"))
            wall, started = time.perf_counter(), time.process_time()  # others use the CPU too
            answer = await http.post(url(address, path), content=content, headers=JSON, timeout=30)
            seconds = time.process_time() - started
            print(f"{case}: {time.perf_counter() - wall:.2f} s, {seconds:.2f} s of CPU")
            print(answer.status_code, answer.text[:200])
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert len(answer.content) < 2000
            assert seconds < LIMIT

    run(test())


JSON = {"Content-Type": "application/json"}
