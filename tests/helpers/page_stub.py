"""A server for tests of the page: it replays recorded streams of the built-in model.

recorded_rounds.json has chunks of one text, decoded plainly and speculatively, each with the rounds
that came with it.
"""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import fastapi
import uvicorn
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles

from jaxspec.commands.generate.tree_page import PAGE

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data/recorded_rounds.json").read_text(encoding="utf-8")
)
PAUSE = 0.02  # seconds between two chunks


class Stub:
    """The app, and the requests that it got. ``api_key`` None: none is needed."""

    def __init__(self, api_key: str | None = None):
        self.requests: list[dict[str, Any]] = []
        self.api_key = api_key
        self.app = fastapi.FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/completions")(self.completions)
        self.app.post("/v1/chat/completions")(self.chat)
        self.app.mount("/", StaticFiles(directory=PAGE, html=True))

    def refusal(self, request: fastapi.Request) -> JSONResponse | None:
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return JSONResponse({"error": {"message": "invalid API key"}}, 401)
        return None

    async def models(self, request: fastapi.Request) -> Any:
        return self.refusal(request) or {"object": "list", "data": [{"id": "python-lm"}]}

    async def completions(self, request: fastapi.Request) -> Any:
        return await self.answer(request, lambda text: {"text": text})

    async def chat(self, request: fastapi.Request) -> Any:
        return await self.answer(request, lambda text: {"delta": {"content": text}})

    async def answer(self, request: fastapi.Request, choice: Any) -> Any:
        refusal = self.refusal(request)
        if refusal is not None:
            return refusal
        body = await request.json()
        self.requests.append(body)
        if body.get("prompt") == "too long":
            return JSONResponse({"error": {"message": "the prompt is too long"}}, 400)
        chunks = RECORDED["plain" if body.get("plain") else "speculative"]

        async def stream() -> AsyncIterator[str]:
            for chunk in chunks:
                own = {"index": 0, "finish_reason": chunk["finish_reason"], **choice(chunk["text"])}
                yield f"data: {json.dumps({**chunk, 'choices': [own]})}\n\n"
                await asyncio.sleep(PAUSE)
            yield "data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")


@contextlib.contextmanager
def served(stub: Stub) -> Iterator[str]:
    """The address of a stub that runs in a thread."""
    config = uvicorn.Config(stub.app, port=0, log_level="error", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        [port] = [socket.getsockname()[1] for one in server.servers for socket in one.sockets]
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        thread.join()
