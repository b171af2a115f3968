"""The files for those who run servers: the dashboard, the scrape example, the container."""

import fnmatch
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from jaxspec.commands import serve
from jaxspec.commands.bench import http as bench_http
from jaxspec.serving.metrics import Metrics

ROOT = Path(__file__).parent.parent.parent
DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs" / "grafana.json").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
LABELS = {"model_name", "engine", "le", "reason", "finished_reason", "position", "shape"}
SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}


def exported() -> set[str]:
    """Names of all samples of a server."""
    text = Metrics("any").text().decode()
    families = [one for one in text_string_to_metric_families(text)]
    return {family.name + end for family in families for end in SUFFIXES[family.type]}


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def variables() -> dict[str, Any]:
    return {one["name"]: one for one in DASHBOARD["templating"]["list"]}


def test_the_dashboard_asks_for_metrics_that_exist():
    queries = [one["definition"] for one in variables().values() if one["type"] == "query"]
    texts = [*expressions(), *queries]
    for text in texts:
        assert (found := re.findall(r"jaxspec:\w+", text)) and set(found) <= exported(), text
        for labels in re.findall(r"by \(([^)]*)\)|\{([^}]*)\}", text):
            names = re.findall(r"\w+(?==)|^\w+$", ",".join(labels).strip(","))
            assert set(names) <= LABELS, text
        for name in re.findall(r"\$(\w+)", text):
            assert name in variables() or name == "__rate_interval"
        for opening, closing in ("()", "[]", "{}"):
            assert text.count(opening) == text.count(closing)
    asked = " ".join(texts)
    own = ("kv_cache_waste_perc", "device_busy_seconds", "programs_compiled", "rounds_total")
    for name in (*own, "num_requests_waiting_by_reason", "time_to_first_token_seconds_bucket"):
        assert f"jaxspec:{name}" in asked


def test_rates_are_of_counters_alone():
    """And what is no rate is a gauge, but for the number of programs."""
    for text in expressions():
        for name in re.findall(r"rate\(jaxspec:(\w+)", text):
            assert name.endswith(("_total", "_bucket", "_sum", "_count")), text
        for name in re.findall(r"(?<!rate\()jaxspec:(\w+)", text):
            assert not name.endswith(("_bucket", "_sum", "_count")), text


def test_grafana_can_import_the_dashboard():
    assert DASHBOARD["id"] is None and re.fullmatch(r"[\w-]{1,40}", DASHBOARD["uid"])
    assert DASHBOARD["title"] and DASHBOARD["schemaVersion"] >= 36
    assert {"from", "to"} <= set(DASHBOARD["time"])
    source = variables()["datasource"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 10
    for panel in panels:
        assert panel["type"] == "timeseries" and panel["title"] and panel["targets"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        for one in (panel, *panel["targets"]):
            assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_prometheus_scrapes_what_the_server_has():
    config = yaml.safe_load((ROOT / "docs" / "prometheus.yml").read_text())
    [job] = config["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    defaults = serve.make_parser().parse_args([])
    assert job["static_configs"] == [{"targets": [f"{defaults.host}:{defaults.port}"]}]


# The container.


def instructions(name: str) -> list[str]:
    """The arguments of every such line, continued lines joined."""
    text = re.sub(r"\\\n", " ", DOCKERFILE)
    return re.findall(rf"^{name} +(.*)$", text, re.MULTILINE)


def in_context(path: str) -> bool:
    """Whether .dockerignore lets a path of the top folder in."""
    kept = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#") and fnmatch.fnmatch(path, line.removeprefix("!")):
            kept = line.startswith("!")
    return kept


def test_the_container_copies_files_that_exist():
    for arguments in instructions("COPY"):
        if not arguments.startswith("--from"):
            *sources, _ = arguments.split()
            for source in sources:
                assert (ROOT / source).exists() and in_context(source), source
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = {word for arguments in instructions("COPY") for word in arguments.split()}
    build = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = {*build, project["project"]["readme"], *project["project"]["license-files"]}
    assert needed <= copied, "the package is not built without them"
    assert not in_context(".git") and not in_context("tests")


def test_the_container_names_extras_and_options_that_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"EXTRAS=([\w,]+)", DOCKERFILE)
    assert len(named) == 2 and "cuda13" in named[0]
    for extras in named:
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
    [entry] = instructions("ENTRYPOINT")
    words = json.loads(entry)
    assert words[:2] == ["jaxspec", "serve"] and "jaxspec" in project["scripts"]
    arguments = serve.make_parser().parse_args(words[2:])
    assert arguments.host == "0.0.0.0" and [str(arguments.port)] == instructions("EXPOSE")


def test_the_container_is_safe_to_run():
    assert instructions("USER") == ["1000"] and "--uid 1000" in DOCKERFILE
    assert DOCKERFILE.rindex("\nUSER") > DOCKERFILE.rindex("\nRUN"), "what runs later is root's"
    assert instructions("VOLUME") == ["/cache"]
    for name in ("HF_HOME", "JAX_COMPILATION_CACHE_DIR"):
        assert f"{name}=/cache/" in DOCKERFILE
    [check] = instructions("HEALTHCHECK")
    assert ":8000/health" in check
    python, flag, code = json.loads(check[check.index("[") :])
    assert (python, flag) == ("python", "-c")
    compile(code, "HEALTHCHECK", "exec")
    assert {line.split()[0] for line in instructions("FROM")} == {"python:3.12-slim"}


# The commands of docs/serving.md.


def commands() -> list[list[str]]:
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    return [shlex.split(line.removesuffix("&"), comments=True) for line in blocks.splitlines()]


def test_options_in_the_docs_exist():
    servers = [words[2:] for words in commands() if words[:2] == ["jaxspec", "serve"]]
    runs = [words for words in commands() if words[:2] == ["docker", "run"]]
    # After the image's name, which is the only word of a run that begins so.
    servers += [
        " ".join(words).rpartition(" jaxspec")[2].partition(" ")[2].split() for words in runs
    ]
    assert len(servers) >= 5
    for words in servers:
        serve.make_parser().parse_args(words)
    [bench] = [words[3:] for words in commands() if words[:3] == ["jaxspec", "bench", "http"]]
    bench_http.make_parser().parse_args(bench)
