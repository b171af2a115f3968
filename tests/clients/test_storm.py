"""The storm of `tests/clients/storm.py`, for a minute, on the built-in model."""

from pathlib import Path

import pytest

from tests.clients import storm
from tests.helpers.serve_process import ROOT, serve_process

TEMPLATE = str(ROOT / "tests" / "clients" / "storm.jinja")


@pytest.mark.slow
def test_all_who_are_not_killed_get_the_answers_that_they_get_alone(tmp_path: Path):
    options = ["--max-length", "768", "--max-rows", "2", "--no-trees", "--chat-template", TEMPLATE]
    with serve_process(*options, "--compilation-cache", str(tmp_path)) as server:
        words = [server.address, "--pid", str(server.process.pid), "--minutes", "1"]
        assert storm.main(words) == 0
