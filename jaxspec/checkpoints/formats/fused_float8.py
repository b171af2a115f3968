"""FP8 experts in tensors of all experts, as transformers has them in memory and some files, too.

``<block>.experts.gate_up_proj`` e4m3 [E, 2 F, H] has gate before up, and ``gate_up_proj_scale_inv``
[E, 2 F / 128, H / 128] (or ``gate_up_proj_scale``) a scale for each 128 x 128 entries, from an
expert's first output on; ``down_proj`` likewise. They become
``<block>.experts.<i>.gate_proj.weight`` with ``weight_scale_inv``, and so on, as other checkpoints
have them.
"""

import re

from jaxspec.checkpoints.formats.eight_bits import BLOCK
from jaxspec.checkpoints.formats.four_bits import E4M3
from jaxspec.checkpoints.formats.views import Tensors, check_shape
from jaxspec.checkpoints.fused_experts import OF_ALL, OfExpert
from jaxspec.models.tensors import CheckpointTensor

WEIGHT, SCALE = re.compile(OF_ALL), re.compile(f"(?P<weight>{OF_ALL})_scale(_inv)?")


def of_each_expert(stored: Tensors, block: tuple[int, int] | None) -> dict[str, CheckpointTensor]:
    """The tensors of a checkpoint, those of all experts and their scales replaced by each one's.

    Args:
      block: outputs and inputs that share a scale, by the config.

    Raises ValueError for other scales than of blocks of 128, and where up begins inside of one of
    several.
    """
    tensors = dict(stored)
    for name, tensor in stored.items():
        scales = (f"{name}{end}" for end in ("_scale_inv", "_scale"))
        if WEIGHT.fullmatch(name) and tensor.dtype == E4M3 and not any(s in stored for s in scales):
            raise ValueError(
                f"{tensor.name} is {E4M3}, but its scales, {tensor.name}_scale_inv, are missing"
            )
    for name, scale in stored.items():
        match = SCALE.fullmatch(name)
        whole = stored.get(match["weight"]) if match else None
        if match is None or whole is None or whole.dtype != E4M3 or len(whole.shape) != 3:
            continue
        if block != BLOCK:
            raise ValueError(
                f"{scale.name} is of all experts: quantization_config: weight_block_size must be "
                f"{list(BLOCK)} for it, not {block and list(block)}"
            )
        count, outputs, inputs = whole.shape
        check_shape(scale, (count, -(-outputs // BLOCK[0]), -(-inputs // BLOCK[1])))
        parts = _parts(whole, match["kind"])
        del tensors[name]
        tensors.pop(match["weight"], None)
        for expert in range(count):
            for projection, (first, size) in parts.items():
                module = f"{match['experts']}.{expert}.{projection}"
                begins, ends = first // BLOCK[0], -(-(first + size) // BLOCK[0])
                rows = begins, 1, ends - begins
                of_weight = OfExpert(whole, expert, first, 1, size, inputs_first=False)
                of_scale = OfExpert(scale, expert, *rows, inputs_first=False)
                tensors |= {f"{module}.weight": of_weight, f"{module}.weight_scale_inv": of_scale}
    return tensors


def _parts(whole: CheckpointTensor, kind: str) -> dict[str, tuple[int, int]]:
    """The first output of each projection of a tensor, and how many it has."""
    outputs = whole.shape[1]
    if kind != "gate_up_proj":
        return {kind: (0, outputs)}
    size = outputs // 2
    in_one_block = outputs <= BLOCK[0]
    if outputs % 2 or (size % BLOCK[0] and not in_one_block):
        raise ValueError(
            f"{whole.name} has {outputs} outputs of gate and up, whose blocks do not begin with up "
            f"unless {2 * BLOCK[0]} divides them: store each expert's projections by themselves"
        )
    return {"gate_proj": (0, size), "up_proj": (size, size)}
