"""schemathesis sends what the OpenAPI document allows, and what it does not.

It needs the extra ``fuzz``; the fields that it found at fault have tests of their own.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.serve_process import serve_process
from tests.helpers.served import TEMPLATE

CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "negative_data_rejection"),
)
EXAMPLES = 25  # of each path, beside those of the phase "coverage"; give it more for a long search


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("schemathesis"), reason="extra fuzz")
def test_nothing_that_schemathesis_sends_breaks_the_server(tmp_path: Path):
    """1,253 cases. What is refused for two fields together is not in the document."""
    template = tmp_path / "template"
    template.write_text(TEMPLATE)
    options = ("--max-rows", "4", "--max-length", "256", "--warm-up", "none")
    cache = ("--compilation-cache", str(tmp_path / "cache"))
    with serve_process(*options, *cache, "--chat-template", str(template)) as server:
        command = [
            *(str(Path(sys.executable).parent / "schemathesis"), "run"),
            *(f"{server.address}/openapi.json", "--checks", ",".join(CHECKS), "--seed", "1"),
            *("--max-examples", str(EXAMPLES), "--continue-on-failure", "--request-timeout", "60"),
            *("--phases", "coverage,fuzzing", "--no-shrink"),
        ]
        found = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=1800, check=False
        )
        print(found.stdout)
        assert found.returncode == 0, found.stdout[-5000:]
