"""What schemathesis makes of the OpenAPI document, if it is installed: no extra names it."""

import collections
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec import LLM
from tests.helpers.listening import KEY, listening

LEAST = 2000  # requests
# Not checked. The document cannot say which fields exclude each other, nor how long a text may be,
# so that much of what it allows is refused, with its reason.
EXCLUDED = "positive_data_acceptance"
ROOT = Path(__file__).parents[2]


def statuses(report: Path) -> collections.Counter[int]:
    found = collections.Counter[int]()
    for line in report.read_text().splitlines():
        scenario = json.loads(line).get("ScenarioFinished", {})
        for sent in scenario.get("recorder", {}).get("interactions", {}).values():
            found[sent["response"]["status_code"]] += 1  # None, without an answer, is a TypeError
    return found


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="needs schemathesis installed"
)
def test_answers_are_those_that_the_document_promises(llm: LLM, tmp_path: Path):
    """Data that it allows and data that it does not, with a key and without."""
    report = tmp_path / "report.ndjson"
    hooks = {"SCHEMATHESIS_HOOKS": "tests.clients.schemathesis_hooks", "PYTHONPATH": str(ROOT)}
    with listening(llm, api_keys=[KEY], max_new_tokens=4) as server:
        words = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.root}/openapi.json"]
        words += ["--header", f"Authorization: Bearer {KEY}", "--exclude-checks", EXCLUDED]
        words += ["--max-examples", "20", "--seed", "0", "--continue-on-failure", "--no-shrink"]
        words += ["--request-timeout", "60", "--suppress-health-check", "all"]
        words += ["--report-ndjson-path", str(report)]
        env = os.environ | hooks
        done = subprocess.run(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, check=False)
    assert done.returncode == 0, done.stdout.decode()[-8000:]
    found = statuses(report)
    assert found.total() >= LEAST and found[200] and max(found) < 500, found
