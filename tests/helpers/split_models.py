"""Small models with every kind of drafter, to be split over devices."""

from jaxspec.config.speculation import SpeculationConfig
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder
from tests.helpers.block_heads import EXTRAS, OTHERS, block_params, block_target
from tests.helpers.mapped_models import mapped_copy
from tests.helpers.random_models import make_params

TREE = SpeculationConfig(num_nodes=6, max_depth=2, top_k=3)
DEEP_TREE = SpeculationConfig(num_nodes=9, max_depth=3, top_k=3)
SPECULATIONS = {
    "none": SpeculationConfig.chain(1),
    "ngram": SpeculationConfig.chain(2),
    "draft_model": SpeculationConfig.chain(2),
    "eagle1": TREE,
    "eagle3": SpeculationConfig.chain(2),
    "eagle3 tree": TREE,
    # Draft tokens are sampled from a distribution over a split and reduced vocabulary.
    "eagle3 rejection": SpeculationConfig.chain(2, "rejection"),
    "draft_model rejection": SpeculationConfig.chain(2, "rejection"),
    "mapped tree": TREE,
    "mapped rejection": SpeculationConfig.chain(2, "rejection"),
    "peagle tree": TREE,
    "dflash": SpeculationConfig.chain(3),
    "dflash tree": DEEP_TREE,
    "reduced dspark": SpeculationConfig.chain(3),
    "reduced dflash tree": DEEP_TREE,
    "dflash rejection": SpeculationConfig.chain(3, "rejection"),
    "dspark": SpeculationConfig.chain(3),
    "dspark tree": DEEP_TREE,
    "dspark rejection": SpeculationConfig.chain(3, "rejection"),
    "rnn tree": DEEP_TREE,
    "dflash2": SpeculationConfig.chain(3),
    "dflash2 tree": DEEP_TREE,
    "dflash2 rejection": SpeculationConfig.chain(3, "rejection"),
    "domino tree": DEEP_TREE,
    "xpress": SpeculationConfig.chain(3),
    "lilicorr tree": DEEP_TREE,
    "gated": SpeculationConfig.chain(3),
    "rnn rejection": SpeculationConfig.chain(3, "rejection"),
    "domino rejection": SpeculationConfig.chain(3, "rejection"),
    "xpress tree": DEEP_TREE,
    "xpress rejection": SpeculationConfig.chain(3, "rejection"),
    "lilicorr rejection": SpeculationConfig.chain(3, "rejection"),
    "windowed tree": DEEP_TREE,
    "causal": SpeculationConfig.chain(3),
    "mimo tree": DEEP_TREE,
    "mixed": SpeculationConfig.chain(2),
    "mixed rejection": SpeculationConfig.chain(2, "rejection"),
    "ngram+dflash": SpeculationConfig.chain(3),
    "ngram+dspark tree": DEEP_TREE,
    "suffix": SpeculationConfig.chain(3),
    "suffix mixed tree": TREE,
}


def is_of_blocks(name: str) -> bool:
    return any(kind in name for kind in (*EXTRAS, *OTHERS))


def params_of(name: str, target: Decoder) -> EngineParams:
    """The drafter of a name of SPECULATIONS, on one device. Block heads need a target of their own,
    of the same config."""
    drafter = name.removesuffix(" tree").removesuffix(" rejection")
    if is_of_blocks(name):
        return block_params(drafter, SPECULATIONS[name], block_target(target.config))
    if drafter == "mapped":
        spec = SPECULATIONS[name]
        return EngineParams(target=target, drafter=mapped_copy(target), speculation=spec)
    return make_params(drafter, SPECULATIONS[name], target)
