"""What a client may ask for: rates, sizes, times and origins."""

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from jaxspec import LLM
from jaxspec.__main__ import main
from jaxspec.serving.errors import ApiError
from jaxspec.serving.rates import MOST_CLIENTS, Rates
from jaxspec.serving.security import OPEN
from tests.helpers.served import MODEL, Served, idle_pages, run, with_http

TEXT = {"model": MODEL, "prompt": "abc", "max_tokens": 4, "temperature": 0}
MESSAGES = [{"role": "user", "content": "abc"}]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def refused(rates: Rates, client: str = "a") -> ApiError | None:
    try:
        rates.admit(client)
    except ApiError as error:
        return error
    return None


def test_requests_a_minute_are_those_of_one_client():
    clock = Clock()
    rates = Rates(requests=2, clock=clock)
    assert [refused(rates) is None for _ in range(3)] == [True, True, False]
    assert refused(rates, "b") is None
    error = refused(rates)
    assert error is not None and (error.status, error.headers) == (429, {"Retry-After": "30"})
    clock.now = 29.0
    assert refused(rates) is not None
    clock.now = 30.0
    assert [refused(rates) is None for _ in range(2)] == [True, False]
    clock.now = 1000.0  # what is not used is kept, up to a minute's
    assert [refused(rates) is None for _ in range(3)] == [True, True, False]


def test_tokens_may_be_overdrawn_and_are_waited_for():
    clock = Clock()
    rates = Rates(tokens=60, clock=clock)
    assert refused(rates) is None
    rates.spend("a", 159)
    error = refused(rates)
    assert error is not None and error.headers == {"Retry-After": "100"}
    assert "60 tokens a minute" in error.message and refused(rates, "b") is None
    clock.now = 100.0
    assert refused(rates) is None


def test_few_clients_are_remembered():
    rates = Rates(requests=1)
    for client in range(MOST_CLIENTS + 5):
        rates.admit(str(client))
    assert len(rates._clients) == MOST_CLIENTS


@pytest.mark.parametrize("stream", [False, True])
def test_each_key_has_its_rate(llm: LLM, stream: bool):
    async def ask(http: httpx.AsyncClient, key: str, path: str = "completions") -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        own = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        body = TEXT if path == "completions" else own
        return await http.post(f"/v1/{path}", headers=headers, json={**body, "stream": stream})

    async def test() -> None:
        for path in ("completions", "chat/completions"):
            rates = Rates(tokens=6)  # a prompt of 3 tokens and 4 more: the next one must wait
            served = Served(llm, api_keys=["x", "y"], rates=rates)
            async with served as server, server.http() as http:
                assert (await ask(http, "x", path)).status_code == 200
                answer = await ask(http, "x", path)
                assert answer.status_code == 429 and int(answer.headers["Retry-After"]) >= 1
                assert answer.json()["error"]["code"] == "rate_limit_exceeded"
                assert (await ask(http, "y", path)).status_code == 200
                assert (await ask(http, "z", path)).status_code == 401
                assert (await http.get("/health")).status_code == 200

    run(test())


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_what_was_generated_for_a_client_that_has_gone_counts(llm: LLM, path: str):
    """A prompt of 3 tokens (of a chat, of 20), and what came until then."""
    body = {"max_tokens": 200, "ignore_eos": True, "seed": 1}
    prompt = {"prompt": "abc"} if path == "completions" else {"messages": MESSAGES}
    spent: list[int] = []

    class Watched(Rates):
        def spend(self, client: str, tokens: int) -> None:
            spent.append(tokens)

    async def test() -> None:
        rates = Watched(tokens=1000)
        async with Served(llm, rates=rates) as server, server.http() as http:
            asked = asyncio.create_task(http.post(f"/v1/{path}", json=body | prompt))
            async with asyncio.timeout(30):
                while len(spent) < 3:
                    await asyncio.sleep(0.001)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            async with asyncio.timeout(20):
                while not idle_pages(llm):
                    await asyncio.sleep(0.01)

    run(test())
    assert spent[0] == (3 if path == "completions" else 20)
    assert 2 <= sum(spent[1:]) < 200


def test_without_keys_the_rate_is_that_of_an_address(llm: LLM):
    async def test(http: httpx.AsyncClient) -> list[int]:
        return [(await http.get("/v1/models")).status_code for _ in range(3)]

    assert with_http(llm, test, rates=Rates(requests=2)) == [200, 200, 429]


def test_a_text_has_at_most_so_many_tokens(llm: LLM):
    async def test(http: httpx.AsyncClient) -> None:
        for more in ({}, {"max_tokens": None}, {"max_tokens": 5}):
            body = {**TEXT, "ignore_eos": True, **more}
            usage = (await http.post("/v1/completions", json=body)).json()["usage"]
            assert usage["completion_tokens"] == (4 if more == {} else 5)
        answer = await http.post("/v1/completions", json={**TEXT, "max_tokens": 6})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"
        body = {"messages": MESSAGES, "ignore_eos": True}
        usage = (await http.post("/v1/chat/completions", json=body)).json()["usage"]
        assert usage["completion_tokens"] == 5

    with_http(llm, test, max_new_tokens=5)


def test_other_origins_may_ask_if_they_are_named(llm: LLM):
    origin = "https://example.org"
    ask = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    allowed = "access-control-allow-origin"

    async def test(http: httpx.AsyncClient) -> list[httpx.Response]:
        path, own = "/v1/completions", {"Origin": origin}
        return [
            await http.options(path, headers={**own, **ask}),
            await http.post(path, json=TEXT, headers={**own, "Authorization": "Bearer x"}),
            await http.post(path, json=TEXT, headers=own),
        ]

    for options in ({}, {"cors_origins": ["https://other.org"]}):
        found = with_http(llm, test, api_keys=["x"], **options)
        assert not any(allowed in answer.headers for answer in found)
    answers = with_http(llm, test, api_keys=["x"], cors_origins=[origin])
    assert [answer.status_code for answer in answers] == [200, 200, 401]
    assert all(answer.headers[allowed] == origin for answer in answers)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--requests-per-minute", "0"), ("--tokens-per-minute", "x")),
        *(
            ("--max-tokens-per-request", "-1"),
            ("--request-timeout", "0"),
            ("--body-timeout", "inf"),
        ),
    ],
)
def test_bad_limits_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["serve", option, value])
    assert "must be a" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["a proxy's prefix", "mounted"])
def test_behind_a_prefix_the_same_paths_are_open(llm: LLM, how: str):
    """uvicorn puts its root_path before the path, and so does an application with mounts."""

    async def test() -> list[list[int]]:
        async with Served(llm, api_keys=["right"], rates=Rates(requests=1)) as server:
            outer = Starlette(routes=[Mount("/llm", app=server.app)])
            transport = (
                httpx.ASGITransport(app=server.app, root_path="/llm")
                if how != "mounted"
                else httpx.ASGITransport(app=outer)
            )
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                paths = [path for path in OPEN for _ in range(2)]  # no rate counts them
                found = [(await http.get(f"/llm{path}")).status_code for path in paths]
                key = {"Authorization": "Bearer right"}
                asked = [{}, key, key]  # no key; the first of a minute; the second
                kept = [await http.get("/llm/v1/models", headers=one) for one in asked]
                return [found, [answer.status_code for answer in kept]]

    found, kept = run(test())
    assert set(found) == {200} and kept == [401, 200, 429]
