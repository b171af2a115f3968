"""Several CPU devices, text to train on, few compiled programs, and a record of GPU tests."""

import dataclasses
import datetime
import functools
import gc
import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import pytest

from jaxspec.commands.shared.run_facts import source_commit
from jaxspec.engine.memory import USABLE_MAPS, maps_are_scarce
from tests.helpers.compilations import Compilations, compilations_meanwhile

if TYPE_CHECKING:
    from jaxspec import LLM

jax.config.update("jax_num_cpu_devices", 8)
ROOT = Path(__file__).parent.parent
# Modules and tests are many objects that stay, and traces many that go: by default Python looks
# through all of them so often that it takes a tenth of the time.
gc.set_threshold(50_000, 20, 20)


def pytest_configure(config: pytest.Config) -> None:
    """The default tests compile quickly; the slow ones run what users run."""
    if config.option.markexpr == "not slow and not gpu and not real":
        jax.config.update("jax_disable_most_optimizations", True)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture
def compilations() -> Iterator[Compilations]:
    """What XLA compiles meanwhile."""
    with compilations_meanwhile() as found:
        yield found


# Files that take longest, so that the workers of pytest-xdist begin with them and end together.
LONGEST = (
    "test_engine_histories", "test_engine", "test_likely_chain", "test_exactness", "test_layers",
    "test_tensor_parallel", "test_formats", "test_sequence_parallel", "test_llm", "test_rows",
    "test_chat", "test_hybrid_prefixes", "test_llm_structured", "test_expert_product",
    "test_packed_product", "test_engine_options", "test_acceptance", "test_experts",
    "test_shared_pages", "test_delta_rule", "test_run", "test_delta_rule_benchmarks",
    "test_latent_attention", "test_pipeline", "test_background", "test_delta_rule_kernel",
    "test_llm_options", "test_scripts", "test_preemption", "test_block_exactness",
    "test_quantized_exactness", "test_layering", "test_async_engine", "test_endings",
    "test_generate", "test_examples",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


class TestModule(pytest.Module):
    """Skipped where a package of the extra `test` is not installed."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            missing = error.__cause__
            if isinstance(missing, ModuleNotFoundError) and missing.name in packages_of_tests():
                cure = "install jaxspec-decoding[test]"
                pytest.skip(f"no {missing.name}: {cure}", allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return TestModule.from_parent(parent, path=module_path)


@functools.cache
def packages_of_tests() -> set[str]:
    """Import names of the extra's packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["optional-dependencies"]["test"]
    return {re.split(r"[^\w-]", own)[0].replace("-", "_") for own in requirements}


# When the GPU tests last passed. Written here, by a run of all of them that passed.
GPU_RECORD = ROOT / "docs/gpu_tests.json"


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """Forget the compiled programs between files, before engines have to do so by themselves."""
    yield
    if maps_are_scarce(USABLE_MAPS / 2):
        jax.clear_caches()


@pytest.fixture(autouse=True)
def few_slow_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """A file of slow tests alone may compile too many. To count them takes milliseconds."""
    yield
    if request.node.get_closest_marker("slow") and maps_are_scarce():
        jax.clear_caches()


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose tokens are bytes."""
    from tests.helpers.checkpoints import tiny_byte_llama  # it imports torch  # noqa: PLC0415

    return tiny_byte_llama(tmp_path_factory.mktemp("bytes"), eos_token_id=256)


@pytest.fixture(scope="session")
def byte_llm(byte_model: Path) -> "LLM":
    """It drafts by lookup; its few programs, for requests of any kind, serve several files."""
    from jaxspec.config.structured_output import StructuredOutput  # noqa: PLC0415
    from tests.helpers.engines import FULL, seal, tiny_llm  # noqa: PLC0415

    llm = tiny_llm(byte_model)
    seal(llm.engine, dataclasses.replace(FULL, structured=StructuredOutput(json_object=True)))
    return llm


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder of Python files."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in "abcdefgh":
        (folder / f"{name}.py").write_text(f"def {name}(x):\n    return x + 1\n\n\n" * 40)
    return folder


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """After `pytest -m gpu` over the whole suite: write down that it passed, and where."""
    whole = config.option.markexpr == "gpu" and config.args_source.name != "ARGS"
    counts = {kind: len(terminalreporter.stats.get(kind, ())) for kind in ("passed", "skipped")}
    if hasattr(config, "workerinput") or not (exitstatus == 0 and whole and counts["passed"]):
        return  # a worker of pytest-xdist sees its own tests only
    if jax.default_backend() == "gpu":
        GPU_RECORD.write_text(json.dumps(gpu_record(counts), indent=2) + "\n")
        terminalreporter.write_line(f"wrote {GPU_RECORD}")


def gpu_record(counts: dict[str, int]) -> dict[str, Any]:
    return {
        "command": "pytest -m gpu",
        **counts,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": source_commit() or "unknown",
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
