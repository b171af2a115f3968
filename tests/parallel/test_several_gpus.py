"""What several devices compute in bfloat16, with the kernels of the device, is what one does.

Benchmarks with synthetic acceptance cannot see a wrong token. These tests can, on 2, 4 and 8 GPUs.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import functional
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.engine.engine import Engine
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder
from jaxspec.models.nodes import map_nodes
from jaxspec.models.quantized.float4 import Float4Linear, in_float4_order
from jaxspec.parallel import replica_meshes, stage_meshes
from pallas_kernels.selection import OPERATIONS, Kernels
from tests.helpers.layouts import in_stages, on_mesh
from tests.helpers.marks import slow
from tests.helpers.model_kinds import KINDS
from tests.helpers.random_models import make_params, random_prompts, random_target, tiny_config

# As narrow as the kernel allows in which devices sum their products.
SIZES = {"hidden_size": 512, "intermediate_size": 512, "head_dim": 128, "num_layers": 4}
PROMPTS = [prompt.tolist() for prompt in random_prompts((90, 33, 5), seed=1)]
CLOSE = 0.1  # bound of the differences of log-probabilities: roundings of bfloat16


@functools.cache
def target() -> Decoder:
    return random_target(tiny_config(num_heads=8, num_kv_heads=4, **SIZES))


@dataclasses.dataclass(frozen=True)
class How:
    """Devices of each kind of parallelism, and which kernels run on them."""

    tp: int = 1
    pp: int = 1
    sp: int = 1
    dp: int = 1
    kernels: str = "auto"

    def __str__(self) -> str:
        return f"tp{self.tp}-pp{self.pp}-sp{self.sp}-dp{self.dp}-{self.kernels}"

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.sp * self.dp


ON_GPUS = [
    *(How(tp=2), How(tp=4), How(tp=8)),
    *(How(pp=2), How(tp=2, pp=2), How(tp=4, pp=2)),
    *(How(sp=2), How(sp=4), How(sp=8), How(tp=2, sp=2), How(tp=4, sp=2)),
    *(How(sp=2, kernels="all"), How(sp=4, kernels="all"), How(tp=2, sp=2, kernels="all")),
    *(How(dp=4), How(tp=2, dp=2)),
]
SIMULATED = [How(tp=2), How(tp=8), How(tp=4, pp=2), How(tp=4, sp=2), How(tp=2, dp=2)]


def one_device(kernels: Kernels) -> EngineParams:
    params = make_params("eagle3", SpeculationConfig.chain(3), target())
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, params)
    return params.replace(kernels=kernels)


def kernels_of(how: How) -> Kernels:
    """Four and eight devices use the kernels that are the default on two; "all" adds attention to
    parts of pages."""
    measured = Kernels.for_device(sharing=2 if how.tp > 1 else 1)
    if how.kernels == "all" and measured.operations:
        return dataclasses.replace(measured, operations=frozenset(OPERATIONS))
    return measured


def replicas(how: How) -> list[EngineParams]:
    """The parameters of each of the engines that run side by side."""
    params = one_device(kernels_of(how))
    found = []
    for mesh in replica_meshes(how.dp, how.tp, how.sp, how.pp):
        assert mesh is not None
        if how.pp > 1:
            found.append(in_stages(params, (3, 1), stage_meshes(mesh), shard_drafter=False))
        else:
            found.append(on_mesh(params, mesh, shard_drafter=False))
    return found


def logprobs(params: EngineParams) -> list[list[Any]]:
    """Of each prompt's tokens but the first, and of those after it: (token, log-probability)."""
    cache = CacheConfig(page_size=32, max_length=128)
    engine = Engine(params, cache, EngineConfig(max_rows=4, rounds_per_call=2))
    sampling = SamplingParams(max_tokens=6, logprobs=1, prompt_logprobs=1)
    generations = engine.add_all(PROMPTS, [sampling] * len(PROMPTS))
    engine.finish(generations)
    assert not any(one.error for one in generations)
    found = [(own.prompt_logprobs or [])[1:] + (own.logprobs or []) for own in generations]
    assert all(len(own) > len(prompt) for own, prompt in zip(found, PROMPTS, strict=True))
    return [[(one.token_id, one.logprob) for one in own if one is not None] for own in found]


@pytest.mark.parametrize(
    "how",
    [pytest.param(how, marks=pytest.mark.gpu) for how in ON_GPUS]
    + [slow(how) for how in SIMULATED],
    ids=str,
)
def test_several_devices_compute_what_one_does(how: How):
    if len(jax.devices()) < how.devices:
        pytest.skip(f"{how.devices} devices are needed")
    wanted = logprobs(one_device(kernels_of(How())))
    for params in replicas(how):
        check_close(logprobs(params), wanted)


def check_close(found: Sequence[list[Any]], wanted: Sequence[list[Any]]) -> None:
    """Results of ``logprobs``: the same tokens but for a near tie at the end, about as likely."""
    assert np.concatenate(differences(found, wanted)).max() <= CLOSE


def differences(
    found: Sequence[list[Any]], wanted: Sequence[list[Any]], last: int = 3
) -> list[np.ndarray]:
    """Of the log-probabilities of each prompt, up to the first token that differs, which is of the
    ``last`` ones."""
    result = []
    for ours, theirs in zip(found, wanted, strict=True):
        same = 0  # tokens before the first that differs, which may be a near tie
        while same < len(theirs) and ours[same][0] == theirs[same][0]:
            same += 1
        assert same >= len(theirs) - last
        values = (np.array([value for _, value in tokens[:same]]) for tokens in (ours, theirs))
        result.append(np.abs(np.subtract(*values)))
    return result


# Models that use kernels of their own: weights and pages of 4 and 8 bits, latents, experts,
# recurrences.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The directory of a kind of model, by its name."""
    return functools.cache(lambda kind: KINDS[kind].save(tmp_path_factory.mktemp("model")))


def chosen_kernels() -> str:
    return "all" if Kernels.for_device().operations else "none"


@pytest.mark.parametrize(
    ("kind", "devices"),
    [pytest.param(kind, n, marks=pytest.mark.gpu) for kind in KINDS for n in (2, 4)]
    + [slow(kind, 4) for kind in KINDS],
)
def test_every_kernel_computes_on_several_devices_what_it_does_on_one(
    kind: str, devices: int, checkpoint: Any
):
    if len(jax.devices()) < devices:
        pytest.skip(f"{devices} devices are needed")
    path: Path = checkpoint(kind)
    alone, shared = (
        logprobs(KINDS[kind].load(path, count, chosen_kernels())) for count in (1, devices)
    )
    found = np.concatenate(differences(shared, alone))
    assert found.max() <= KINDS[kind].close and found.mean() <= KINDS[kind].close_on_average


@pytest.mark.parametrize("kind", [slow(kind) for kind in KINDS])
def test_the_kernels_are_in_the_programs_of_four_devices(kind: str, checkpoint: Any):
    """So that the test above, on GPUs, runs what it is for."""
    params = KINDS[kind].load(checkpoint(kind), 4, "none")
    target = map_nodes(params.target, in_float4_order, Float4Linear)  # as GPUs have them
    params = params.replace(target=target, kernels=Kernels(frozenset(OPERATIONS)))
    state = functional.init_state(params, 4, 128, page_size=32)

    def generate(params: EngineParams, state: Any) -> Any:
        state, _ = functional.prefill(params, state, width=32, greedy=True)
        return functional.decode(params, state, 2, max_rounds=2, greedy=True)

    lowered = jax.jit(generate).trace(params, state).lower(lowering_platforms=("cuda",))
    calls = [line for line in lowered.as_text().splitlines() if "custom_call @mosaic_gpu" in line]
    for name in KINDS[kind].kernels:
        assert any(f"{name}_kernel" in line for line in calls), name
