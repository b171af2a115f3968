"""Deterministic mode: in bfloat16, too, a request's text does not depend on what else is going on.

A matrix product of a fixed shape gives each row of its result the same value wherever the row
stands and whatever the other rows hold. So all calls have the same shapes (see
program_sizes.Sizes.fixed). Attention, whose shape follows the sequences, adds up in float64. The
compiler may neither choose kernels by timing them nor drop a rounding where it fuses (see
compiler_options.py). What is shared or brought back is what the same program would compute: pages
that were read as a prompt are never exchanged for pages that were generated, and requests are
swapped, not recomputed.
"""

import dataclasses

from jaxspec.config.speculation import default_verify_width
from jaxspec.functional import EngineParams
from jaxspec.program_sizes import SMALLEST_CHUNK


def deterministic_params(params: EngineParams) -> EngineParams:
    """The parameters with a fixed verify width.

    Raises ValueError for options whose texts depend on more than the request.
    """
    speculation = params.speculation
    if params.stages or (params.mesh is not None and params.mesh.size > 1):
        raise ValueError(
            "deterministic=True runs on one device: sums over several depend on a row's place"
        )
    if speculation.acceptance != "match":
        raise ValueError(
            'deterministic=True needs acceptance="match": with another rule the text depends on '
            "the drafter"
        )
    if speculation.verify_width is not None:
        return params
    platform = next(iter(params.target.embed.devices())).platform
    width, nodes = default_verify_width(platform), speculation.num_nodes
    if nodes > width:
        raise ValueError(
            f"deterministic=True pads verifications to {width} nodes, and this tree has {nodes}: "
            f"give SpeculationConfig(verify_width={nodes}), to every engine whose texts are to "
            "agree"
        )
    return params.replace(speculation=dataclasses.replace(speculation, verify_width=width))


def fixed_chunk(num_rows: int, max_length: int, budget: int, largest: int) -> int:
    """Prompt tokens of a row in the one program that reads: a power of two.

    All rows together read about ``budget`` tokens in a call.
    """
    chunk = SMALLEST_CHUNK
    while chunk < min(largest, max_length) and 2 * chunk * num_rows <= budget:
        chunk *= 2
    return chunk
