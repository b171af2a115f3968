"""A real Prometheus scrapes a server, and answers every query of the dashboard."""

import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.helpers.serve_process import serve_process

DOCS = Path(__file__).parent.parent.parent / "docs"
DASHBOARD: dict[str, Any] = json.loads((DOCS / "grafana.json").read_text())
ALERTS = re.compile(r"^- `(.*jaxspec:.*)`", re.MULTILINE)
SERVER = ("--warm-up", "none", "--max-rows", "2", "--max-length", "256")
LIMIT = 120  # seconds that anything may take

pytestmark = pytest.mark.slow
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus is not on PATH: apt-get install prometheus",
)


class Prometheus:
    """A server's HTTP API."""

    def __init__(self, port: int):
        self.address = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.address}/-/ready").status_code == 200
        return False

    def data(self, path: str, **arguments: str) -> Any:
        """Raises ValueError with what Prometheus says of a query that is wrong."""
        answer = httpx.get(f"{self.address}/api/v1/{path}", params=arguments).json()
        if answer["status"] != "success":
            raise ValueError(f"{arguments}: {answer['error']}")
        return answer["data"]

    def values(self, query: str) -> list[float]:
        """Now, of each series."""
        return [float(one["value"][1]) for one in self.data("query", query=query)["result"]]


def until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@contextlib.contextmanager
def scraping(target: str, folder: Path) -> Iterator[Prometheus]:
    """Prometheus with docs/prometheus.yml; of the target alone, and each second."""
    config = yaml.safe_load((DOCS / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with subprocess.Popen(command, cwd=folder) as process:
        try:
            prometheus = Prometheus(port)
            until(prometheus.is_ready)
            yield prometheus
        finally:
            process.kill()


def variables(prometheus: Prometheus) -> dict[str, str]:
    """What Grafana puts for each variable of the dashboard when `All` is chosen."""
    found = {"__rate_interval": "1m0s"}  # four times a data source's default scrape interval
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
            assert asked is not None
            values = prometheus.data(f"label/{asked[2]}/values", **{"match[]": asked[1]})
            found[variable["name"]] = f"({'|'.join(map(re.escape, values))})".replace("\\", "\\\\")
    return found


@needs_prometheus
def test_the_scrape_example_is_valid():
    subprocess.run(["promtool", "check", "config", DOCS / "prometheus.yml"], check=True)


@needs_prometheus
def test_every_panel_has_data(tmp_path: Path):
    """And the alerts of docs/serving.md are valid, and say nothing of a server that is well."""
    with (
        serve_process(*SERVER) as server,
        scraping(server.address.removeprefix("http://"), tmp_path) as prometheus,
    ):
        until(lambda: prometheus.values("jaxspec:device_busy_seconds_total"))
        for temperature in (0.0, 0.7):
            body = {"prompt": "def f(", "max_tokens": 32, "temperature": temperature}
            answer = httpx.post(f"{server.address}/v1/completions", json=body, timeout=LIMIT)
            assert answer.status_code == 200
        asked = variables(prometheus)
        until(lambda: prometheus.values("jaxspec:request_success_total > 1"))
        for panel in DASHBOARD["panels"]:
            for target in panel["targets"]:
                query = target["expr"]
                for name, value in asked.items():
                    query = query.replace(f"${name}", value)
                values = prometheus.values(query)
                assert values and all(abs(value) < 1e9 for value in values), query  # no NaN
        alerts = ALERTS.findall((DOCS / "serving.md").read_text())
        assert len(alerts) >= 4
        for alert in alerts:
            assert prometheus.values(alert) == [], alert
