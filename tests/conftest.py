"""Several CPU devices, text to train on, few compiled programs, and a record of GPU tests."""

import datetime
import functools
import gc
import os
import re
import subprocess
import tomllib
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import pytest
from xdist.scheduler import LoadFileScheduling

from jaxspec.commands.shared.run_facts import source_commit
from jaxspec.engine.memory import USABLE_MAPS, maps_are_scarce
from tests.helpers.compilations import Compilations, compilations_meanwhile
from tests.helpers.gpu_suite import (
    WHOLE,
    Part,
    after_part,
    gpu_of_worker,
    ids_of,
    read_record,
    selects_all,
    visible_gpus,
    write_record,
)

if TYPE_CHECKING:
    from jaxspec import LLM

jax.config.update("jax_num_cpu_devices", 8)
ROOT = Path(__file__).parent.parent
# Modules and tests are many objects that stay, and traces many that go: by default Python looks
# through all of them so often that it takes a tenth of the time.
gc.set_threshold(50_000, 20, 20)


def pytest_configure(config: pytest.Config) -> None:
    """The default tests compile quickly; the slow ones run what users run. Workers of a part of the
    GPU tests see a GPU each."""
    worker = getattr(config, "workerinput", {}).get("workerid")
    if worker is not None and int(worker.removeprefix("gw")) % 2:
        config.pluginmanager.register(CollectsBackwards())
    gpus = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if gpu := gpu_of_worker(worker, chosen_part(config), gpus):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # jax has not looked for devices yet
    if part := chosen_part(config):
        config.pluginmanager.register(PartOfGpuTests(part))
    if is_default(config):
        jax.config.update("jax_disable_most_optimizations", True)
    if config.option.markexpr != "gpu":
        # PyTorch's threads wait for work by turning round, on cores that compile. Workers of
        # pytest-xdist inherit this.
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def is_default(config: pytest.Config) -> bool:
    return config.option.markexpr == "not slow and not gpu and not real"


# Folders whose tests are all slow or real. What they import would take each worker seconds.
NOT_BY_DEFAULT = ("clients", "compiled", "real")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if is_default(config) and collection_path.parent == ROOT / "tests":
        return collection_path.name in NOT_BY_DEFAULT or None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """What is imported stays: Python does not look through it."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.fixture
def compilations() -> Iterator[Compilations]:
    """What XLA compiles meanwhile."""
    with compilations_meanwhile() as found:
        yield found


# Of the other files those that take longest, so that the workers of pytest-xdist begin with them
# and end together.
LONGEST = (
    "test_parity", "test_delta_rule", "test_formats", "test_sample", "test_packed_product",
    "test_mtp_parity", "test_default_trees", "test_tensor_parallel", "test_endings",
    "test_expert_product", "test_exactness", "test_packed_expert_product", "test_benchmarking",
    "test_rows", "test_train_lm", "test_hybrid_prefixes", "test_sequence_parallel",
    "test_block_exactness", "test_experts", "test_acceptance", "test_grpo",
    "test_run", "test_float8_pages", "test_delta_rule_kernel", "test_pipeline",
    "test_float8_attention", "test_layers", "test_eagle3_reference",
    "test_paged_attention_kernel", "test_scripts", "test_tunix", "test_from_nnx",
    "test_smollm2", "test_smollm2_scores",  # of the real ones
)  # fmt: skip

# Files whose tests run the same programs: those of byte_llm, and of engines of one shape
# (tests/helpers/engines.py). They take seconds to compile, in each worker and again whenever
# few_programs has forgotten them. And files that read the same sources, by
# tests/helpers/source_trees.py. So all of these come first, those of a group in one worker, and in
# this order.
GROUPS = {
    "byte_llm": (
        "tests/serving/",
        "tests/llm/test_llm.py",
        "tests/llm/test_llm_structured.py",
        "tests/llm/test_llm_options.py",
        "tests/llm/test_llm_weights.py",
        "tests/llm/test_request_length.py",
        "tests/llm/text_drafts/",
    ),
    "engines": (
        "tests/engine/test_engine.py",
        "tests/engine/test_async_engine.py",
        "tests/engine/test_old_texts.py",
        "tests/engine/test_engine_options.py",
        "tests/engine/test_policy_logprobs.py",
        "tests/engine/test_preemption.py",
        "tests/engine/test_draft_watch.py",
        "tests/engine/test_several_processes.py",
    ),
    "sources": (
        "tests/test_layering.py",
        "tests/test_reading.py",
        "tests/docs/test_prose_names.py",
    ),
}


def group_of(nodeid: str) -> tuple[str, int] | None:
    """The group of a test, and the place of its file there."""
    for group, paths in GROUPS.items():
        for place, path in enumerate(paths):
            if nodeid.startswith(path):
                return group, place
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONGEST)}
    first = list(GROUPS)

    def place(item: pytest.Item) -> tuple[int, int, tuple[str, ...]]:
        if (found := group_of(item.nodeid)) is not None:
            return first.index(found[0]) - len(first), found[1], item.path.parts
        return order.get(item.path.stem, len(order)), 0, item.path.parts

    items.sort(key=place)


class Scheduling(LoadFileScheduling):
    """Gives a worker a file at a time, and all files of a group together."""

    def _split_scope(self, nodeid: str) -> str:
        found = group_of(nodeid)
        return super()._split_scope(nodeid) if found is None else found[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    return Scheduling(config, log) if config.option.dist == "loadfile" else None


class CollectsBackwards:
    """Begins with the last folder, in every second worker; the tests are put in order once all are
    known. In a new checkout nothing has bytecode: of two workers in step, each would compile every
    file that is imported, and rewrite every assertion."""

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        if isinstance(collector, pytest.Dir):
            report.result.reverse()
        return report


class PartOfGpuTests:
    """Leaves the tests of one part, out of those that -m gpu has left."""

    def __init__(self, part: Part):
        self.part = part

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        chosen = set(ids_of(self.part, [item.nodeid for item in items]))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]


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
    names = {re.split(r"[^\w-]", own)[0].replace("-", "_") for own in requirements}
    return {"agents" if name == "openai_agents" else name for name in names}


# When the GPU tests last passed: written here, by a run of all of them, or of a part.
GPU_RECORD = ROOT / "docs/gpu_tests.json"


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """Forget the compiled programs between files, before engines have to do so by themselves. It
    takes seconds, and what is forgotten is compiled again."""
    yield
    if maps_are_scarce(0.85 * USABLE_MAPS):
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
    from tests.helpers.engines import FULL, STRUCTURED, tiny_llm  # noqa: PLC0415

    return tiny_llm(byte_model, kinds=(STRUCTURED, FULL))


@pytest.fixture(scope="session")
def plain_byte_llm(byte_model: Path) -> "LLM":
    """It decodes one request after the other, without speculation: log-probabilities of structured
    ones only."""
    from tests.helpers.engines import SAMPLED, STRUCTURED, tiny_llm  # noqa: PLC0415

    return tiny_llm(byte_model, "none", kinds=(STRUCTURED, SAMPLED), max_rows=1)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder of Python files."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in "abcdefgh":
        (folder / f"{name}.py").write_text(f"def {name}(x):\n    return x + 1\n\n\n" * 40)
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("jaxspec")
    group.addoption(
        "--gpu-part", metavar="K/N", help="with -m gpu: one of N parts; the last has the tests of "
        "several GPUs, and with -n the workers of the others take the GPUs by turns"
    )  # fmt: skip
    group.addoption(
        "--gpu-record", type=Path, default=GPU_RECORD, metavar="FILE",
        help="where passed parts of -m gpu are written down (default: docs/gpu_tests.json)"
    )  # fmt: skip


def chosen_part(config: pytest.Config) -> Part | None:
    """Of --gpu-part; None without it."""
    text = config.option.gpu_part
    if text is None:
        return None
    try:
        part = Part.parse(text)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    if config.option.markexpr != "gpu":
        raise pytest.UsageError("--gpu-part is for -m gpu: give both")
    return part


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """After `pytest -m gpu` over the whole suite, or a part of it: write down that it passed, and
    where; if it failed, that it no longer does."""
    gpu = config.option.markexpr == "gpu"
    whole = selects_all(config.option, config.args_source.name == "ARGS")
    counts = {kind: len(terminalreporter.stats.get(kind, ())) for kind in ("passed", "skipped")}
    if hasattr(config, "workerinput") or not (gpu and whole and counts["passed"]):
        return  # a worker of pytest-xdist sees its own tests only
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and (
        jax.default_backend() == "gpu"
    ):
        part, path = chosen_part(config) or WHOLE, Path(config.option.gpu_record)
        passed = gpu_entry(config, counts) if exitstatus == pytest.ExitCode.OK else None
        write_record(path, after_part(read_record(path), gpu_facts(), part, passed))
        terminalreporter.write_line(f"wrote {path}")


def gpu_facts() -> dict[str, str]:
    commit = source_commit() or "unknown"
    if changed_files() == {GPU_RECORD.relative_to(ROOT).as_posix()}:
        commit = commit.removesuffix("-dirty")  # only by the record of earlier parts
    return {"commit": commit, "device": jax.devices()[0].device_kind, "jax": jax.__version__}


def changed_files() -> set[str]:
    """Tracked files that differ from the last commit; none where git cannot tell."""
    command = ["git", "diff", "--name-only", "HEAD"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return set(result.stdout.split())


def gpu_entry(config: pytest.Config, counts: dict[str, int]) -> dict[str, Any]:
    part = config.option.gpu_part
    return {
        "command": "pytest -m gpu" + (f" --gpu-part {part}" if part else ""),
        **counts,
        "gpus": jax.device_count(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
