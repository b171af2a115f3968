"""What a Hopper GPU computes with quantized experts, as loaders put them there.

The kernels of experts and the same numbers widened, in one model: log-probabilities are close.
"""

from pathlib import Path

import numpy as np
import pytest

from jaxspec.models.mlps.experts import Experts
from jaxspec.models.nodes import nodes_of
from jaxspec.models.quantized.packed_experts import PackedExpertLinear
from tests.helpers.model_kinds import EXPERTS, RECURRENT, ModelKind
from tests.parallel.test_several_gpus import differences, logprobs

WITH_SHARED = {
    **RECURRENT,
    "model_type": "qwen3_5_moe_text",
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
PLAIN = {**EXPERTS, "moe_intermediate_size": 128}
NAME = frozenset({"packed_expert_product"})
KINDS = {
    "blocks, with a shared expert": ModelKind(NAME, WITH_SHARED, "float8 blocks", close=0.5),
    "blocks": ModelKind(NAME, PLAIN, "float8 blocks", close=0.5),
    "scales of outputs": ModelKind(NAME, PLAIN, "float8", close=0.5),
    "mxfp8": ModelKind(NAME, PLAIN, "mxfp8", close=0.5),
    "int4": ModelKind(NAME, PLAIN, "compressed", close=0.5),
    "int4, zeros": ModelKind(NAME, PLAIN, "compressed, zeros", close=0.5),
}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_compute_what_the_widened_experts_do(kind: str, tmp_path: Path):
    path = KINDS[kind].save(tmp_path)
    ours, wide = (KINDS[kind].load(path, 1, kernels) for kernels in ("all", "none"))
    for experts in nodes_of(ours.target, Experts):
        assert isinstance(experts.gate_up, PackedExpertLinear)
        assert experts.shared is None  # among the others, if there is one
    found = np.concatenate(differences(logprobs(ours), logprobs(wide), last=5))
    assert found.max() <= KINDS[kind].close and found.mean() <= 0.1
