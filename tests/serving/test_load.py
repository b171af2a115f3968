"""Many clients at once, some of which are killed, on the built-in model.

`python -m tests.helpers.http_load` runs the same for 1,000 requests, or for minutes, on more rows.
"""

import asyncio
from pathlib import Path

import pytest

from tests.helpers.http_load import SERVER, load
from tests.helpers.serve_process import serve_process

ROWS = ("--max-rows", "2")  # few programs: they take most of the time
REQUESTS, DIFFERENT = 96, 16  # of which 8 have other options each, twice


@pytest.mark.slow
def test_all_who_are_not_killed_get_their_text(tmp_path: Path):
    with serve_process(*SERVER, *ROWS, "--compilation-cache", str(tmp_path)) as server:
        report = asyncio.run(load(server, REQUESTS, seconds=0, clients=64, different=DIFFERENT))
        assert (report.wrong, report.compiled) == ([], 0)
        assert report.requests >= REQUESTS and report.killed > 5
        assert server.metric("num_requests_running") + server.metric("num_requests_waiting") == 0
