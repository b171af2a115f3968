"""Many clients at once, some of which are killed, on the built-in model.

`python -m tests.http_load` runs the same for 1,000 requests, or for minutes.
"""

import asyncio
from pathlib import Path

import pytest

from tests.http_load import SERVER, load
from tests.serve_process import serve_process


@pytest.mark.slow
def test_all_who_are_not_killed_get_their_text(tmp_path: Path):
    with serve_process(*SERVER, "--compilation-cache", str(tmp_path)) as server:
        report = asyncio.run(load(server, count=200, seconds=0, clients=64))
        assert (report.wrong, report.compiled) == ([], 0)
        assert report.requests >= 200 and report.killed > 5
        assert server.metric("num_requests_running") + server.metric("num_requests_waiting") == 0
