"""Where a server listens, and the ids of requests."""

import json
import logging
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from jaxspec import LLM
from jaxspec.__main__ import main
from jaxspec.serving.endpoint import Endpoint
from tests.helpers.served import MODEL, Served, run, with_http


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost, and its key."""
    folder = tmp_path_factory.mktemp("pem")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


def test_https_serves_with_a_certificate(llm: LLM, pem: tuple[Path, Path]):
    certificate, key = pem
    endpoint = Endpoint(certificate=certificate, key=key)

    async def test() -> httpx.Response:
        async with Served(llm) as server, server.listening(endpoint) as listening:
            context = ssl.create_default_context(cafile=certificate)
            async with httpx.AsyncClient(verify=context) as http:
                return await http.get(f"{endpoint.url(listening)}/v1/models")

    answer = run(test())
    assert answer.url.scheme == "https" and answer.json()["data"][0]["id"] == MODEL


def test_certificates_are_checked_before_anything_is_loaded(pem, tmp_path, capsys):
    certificate, key = pem
    for options, message in (
        (["--ssl-certfile", tmp_path / "none.pem"], f"there is no file {tmp_path / 'none.pem'}"),
        (["--ssl-certfile", certificate], f"cannot use the certificate {certificate}"),
        (["--ssl-keyfile", key], "--ssl-keyfile needs --ssl-certfile"),
        (["--root-path", "llm/"], "--root-path must be like /llm, got 'llm/'"),
        (["--uds", tmp_path / "s", "--port", "1"], "--uds and --port exclude each other"),
    ):
        assert main(["serve", *map(str, options)]) == 2
        error = capsys.readouterr().err
        assert message in error and len(error.splitlines()) == 1


def test_a_unix_socket_and_a_prefix(llm: LLM, tmp_path: Path):
    endpoint = Endpoint(path=tmp_path / "socket", root_path="/llm")

    async def test() -> list[str]:
        transport = httpx.AsyncHTTPTransport(uds=str(endpoint.path))
        async with Served(llm) as server, server.listening(endpoint) as listening:
            with pytest.raises(OSError, match="another server listens there"):
                endpoint.listen()
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
                texts = [(await http.get(path)).text for path in ("/llm/health", "/health")]
            return [endpoint.url(listening), *texts]

    url, *texts = run(test())
    assert url == f"unix:{tmp_path}/socket/llm"
    assert [json.loads(text)["status"] for text in texts] == [
        "ready"
    ] * 2  # some proxies cut their prefix off
    assert not (tmp_path / "socket").exists()


def test_only_a_socket_that_nobody_serves_is_replaced(tmp_path: Path):
    left, file = Endpoint(path=tmp_path / "left"), Endpoint(path=tmp_path / "file")
    left.listen().close()  # as after a crash
    left.listen().close()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(OSError, match=r"cannot listen at .*file: .* is no socket"):
        file.listen()
    assert (tmp_path / "file").read_text() == "kept"


def test_an_address_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1:{port}: Address already"):
            Endpoint(port=port).listen()


def test_answers_and_the_log_have_the_id_of_their_request(llm: LLM, caplog):
    caplog.set_level(logging.INFO, "jaxspec.access")

    async def test(http: httpx.AsyncClient) -> list[httpx.Response]:
        prompt = {"model": MODEL, "prompt": "ab", "max_tokens": 1}
        return [
            await http.head("/health"),
            await http.get("/version", headers={"X-Request-Id": "mine-1"}),
            await http.get("/v1/none%0Aforged", headers={"X-Request-Id": "two words"}),
            await http.post("/v1/completions", json=prompt, headers={"X-Request-Id": "mine-2"}),
        ]

    answers = with_http(llm, test, access_log=True)
    assert [answer.status_code for answer in answers] == [200, 200, 404, 200]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert ids[1] == "mine-1" and ids[3] == "mine-2" and len({len(ids[0]), len(ids[2]), 32}) == 1
    lines = [record.getMessage() for record in caplog.records if record.name == "jaxspec.access"]
    assert [line.split()[-1] for line in lines] == ids
    assert "HEAD /health 200 " in lines[0] and "GET /v1/none%0Aforged 404 " in lines[2]
