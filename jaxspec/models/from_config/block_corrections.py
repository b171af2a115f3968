"""The keys of a block head's ``config.json`` that say what it has beside DFlash's layers: how its
logits are corrected, convolutions, a confidence head."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from jaxspec.config.checks import Problems
from jaxspec.config.model import ModelConfig
from jaxspec.models.heads import BlockHead, MarkovConfig
from jaxspec.models.heads.convolutions import ConvolutionConfig
from jaxspec.models.heads.corrections import (
    MARKOV_KINDS,
    CorrectionConfig,
    Domino,
    DominoConfig,
    LiLiCorr,
    LiLiCorrConfig,
    Selector,
    SelectorConfig,
    XPress,
    XPressConfig,
)
from jaxspec.models.json.keys import words
from jaxspec.models.json.values import (
    check_flag,
    is_integer,
    is_positive_integer,
    is_positive_number,
    shown,
)

Kind = Literal["dflash", "dspark", "dflash2", "lilicorr", "domino", "xpress"]
CONFIDENCE = ("enable_confidence_head", "confidence_head_with_markov")
DSPARK_KEYS = words("markov_rank markov_head_type num_anchors") | {*CONFIDENCE}
CONVOLUTION = ("conv_kernel_size", "conv_group_size")
SELECTOR = ("selector_rank", "selector_top_k")
LILICORR_SIZES = (
    "lilicorr_candidate_topk",
    "lilicorr_num_layers",
    "lilicorr_num_heads",
    "lilicorr_factor_dim",
)
LILICORR_NUMBERS = ("lilicorr_mlp_ratio", "lilicorr_vector_eps", "lilicorr_logit_scale")
MOST_CANDIDATES = 16
DOMINO_SIZES = ("gru_hidden_dim", "emb_dim")
XPRESS_SIZES = ("xpress_rank", "xpress_mlp_hidden")
_RATIO = "xpress_mlp_ratio"  # of these sizes
LOGITS = ("output_multiplier", "final_logit_softcapping")


@dataclasses.dataclass(frozen=True)
class HeadKind:
    """What the heads of a kind have beside DFlash's.

    Attributes:
      name: what ``projector_type`` and ``speculators_model_type`` call it.
      keys: its options.
      defaults: of options that the speculators library leaves out.
      both_ways: in files of the speculators library that do not say it, sliding layers are not
        causal inside of a block.
      predicts_next: see BlockConfig, of files that do not say it.
    """

    name: Kind
    keys: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = MappingProxyType({})
    both_ways: bool = False
    predicts_next: bool = False

    def defaults_beside(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The defaults of what ``given`` options leave out."""
        implied = {_RATIO} if XPRESS_SIZES[1] in given else set()
        return {key: value for key, value in self.defaults.items() if key not in implied}


_DSPARK_DEFAULTS = {"markov_rank": 256, "markov_head_type": "vanilla"}
_DFLASH2_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    dict(zip((*CONVOLUTION, *SELECTOR), (2, 16, 256, 16), strict=True))
)
HEAD_KINDS: Mapping[str, HeadKind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            HeadKind("dflash"),
            HeadKind(
                "dspark",
                DSPARK_KEYS,
                _DSPARK_DEFAULTS | dict.fromkeys(CONFIDENCE, True),
                predicts_next=True,
            ),
            HeadKind(
                "dflash2",
                frozenset((*CONVOLUTION, *SELECTOR, *LOGITS)),
                _DFLASH2_DEFAULTS,
                both_ways=True,
            ),
            HeadKind(
                "lilicorr",
                words("lilicorr_enabled lilicorr_hidden_size")
                | {*LILICORR_SIZES, *LILICORR_NUMBERS, *CONVOLUTION},
            ),
            # How many passes, and over how many tokens, is for engines that iterate.
            HeadKind(
                "xpress",
                words("xpress_block_size xpress_num_passes xpress_topc")
                | words("num_jacobi_passes xpress_backbone xpress_selector sample_from_anchor")
                | {*XPRESS_SIZES, _RATIO},
                {"xpress_rank": 256, _RATIO: 2, "num_jacobi_passes": 6},
            ),
            HeadKind("domino", words("pure_draft_prefix_len shift_label") | {*DOMINO_SIZES}),
        )
    }
)


def correction_config(
    kind: Kind, options: Mapping[str, Any], target: ModelConfig, eps: Any
) -> CorrectionConfig | None:
    """The correction that a head of a kind has, with layers as wide as the target's and this
    epsilon of their norms; None: none. Raises ValueError for one that is not supported."""
    match kind:
        case "dflash":
            return None
        case "dspark":
            return _markov(options)
        case "dflash2":
            return _selector(options, target.vocab_size)
        case "lilicorr":
            return _lilicorr(options, target.hidden_size, eps)
        case "domino":
            return _domino(options)
        case "xpress":
            return _xpress(options)


def _markov(options: Mapping[str, Any]) -> MarkovConfig | None:
    rank, kind = options.get("markov_rank", 0), options.get("markov_head_type")
    if not is_integer(rank) or rank < 0:
        raise ValueError(f"markov_rank must be an integer from 0, got {shown(rank)}")
    if not rank:
        return None
    for supported in MARKOV_KINDS:
        if kind == supported:
            return MarkovConfig(rank, supported)
    kinds = ", ".join(map(repr, MARKOV_KINDS))
    raise ValueError(f"markov_head_type {shown(kind)} is not supported, only {kinds}")


def _selector(options: Mapping[str, Any], vocab: int) -> SelectorConfig:
    rank, count = positive_integers(options, SELECTOR)
    if count > vocab:
        raise ValueError(f"{SELECTOR[1]} is {count}, and the target has {vocab} tokens")
    return SelectorConfig(rank, count)


def _lilicorr(options: Mapping[str, Any], hidden: int, eps: Any) -> LiLiCorrConfig:
    problems, width = Problems(), options.get("lilicorr_hidden_size", 0) or hidden
    if not is_positive_integer(width):
        problems.add(f"lilicorr_hidden_size must be an integer from 0, got {shown(width)}")
    if options.get("lilicorr_enabled", True) is not True:
        problems.add(f"lilicorr_enabled must be true, got {shown(options['lilicorr_enabled'])}")
    for name in LILICORR_NUMBERS:
        if not is_positive_number(options.get(name)):
            problems.add(f"{name} must be a positive number, got {shown(options.get(name))}")
    with problems.caught():
        count, layers, heads, factor = positive_integers(options, LILICORR_SIZES)
        if count > MOST_CANDIDATES or count & (count - 1):
            problems.add(f"lilicorr_candidate_topk must be a power of 2 up to 16, got {count}")
        if is_positive_integer(width) and width % heads:
            problems.add(f"lilicorr_num_heads {heads} does not divide the hidden size of {width}")
    problems.raise_all()
    ratio, vector_eps, scale = (float(options[name]) for name in LILICORR_NUMBERS)
    size: Any = options.get("block_size")
    return LiLiCorrConfig(
        candidates=count,
        hidden=width,
        layers=layers,
        heads=heads,
        units=int(width * ratio),
        factor=factor,
        depths=size - 1 if is_positive_integer(size) else 1,  # else it is refused beside this
        vector_eps=vector_eps,
        logit_scale=scale,
        eps=eps if is_positive_number(eps) else 1e-6,
    )


def _domino(options: Mapping[str, Any]) -> DominoConfig:
    problems, first = Problems(), options.get("pure_draft_prefix_len", 0)
    if not is_integer(first) or first < 0:
        problems.add(f"pure_draft_prefix_len must be an integer from 0, got {shown(first)}")
    with problems.caught():
        state, rank = positive_integers(options, DOMINO_SIZES)
    problems.raise_all()
    return DominoConfig(state, rank, first)


def _xpress(options: Mapping[str, Any]) -> XPressConfig:
    problems = Problems()
    size: Any = options.get("block_size")
    given_size: Any = options.get("xpress_block_size")
    if given_size not in (None, size):
        problems.add(f"xpress_block_size is {shown(given_size)}, and block_size {shown(size)}")
    supported: dict[str, tuple[Any, Any]] = {
        "xpress_backbone": (None, "dflash"),
        "xpress_selector": (None, False),
        "sample_from_anchor": (None, False),
    }
    for name, values in supported.items():
        if options.get(name) not in values:
            given = shown(options[name])
            problems.add(f"{name} = {given} is not supported, only {shown(values[1])}")
    for name in ("xpress_num_passes", "num_jacobi_passes"):
        if not is_positive_integer(options.get(name, 1)):
            problems.add(f"{name} must be a positive integer, got {shown(options[name])}")
    kept = options.get("xpress_topc", 0)
    if not is_integer(kept) or kept < 0:
        problems.add(f"xpress_topc must be an integer from 0, got {shown(kept)}")
    with problems.caught():
        rank, units = positive_integers(_with_xpress_units(options), XPRESS_SIZES)
    problems.raise_all()
    return XPressConfig(rank, units, size if is_positive_integer(size) else 1)


def _with_xpress_units(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options with the width of the MLP, which a ratio to the rank may say.

    Raises ValueError for a ratio that is none, or contradicts the width.
    """
    (rank_name, units_name), ratio = XPRESS_SIZES, options.get(_RATIO)
    rank: Any = options.get(rank_name)
    units: Any = options.get(units_name)
    if not is_positive_integer(rank) or (units is not None and ratio is None):
        return options
    if not is_positive_integer(ratio):
        raise ValueError(f"{_RATIO} must be a positive integer, got {shown(ratio)}")
    if units not in (None, rank * ratio):
        raise ValueError(
            f"{units_name} is {shown(units)}, and {_RATIO} times {rank_name} {rank * ratio}; "
            "remove the one that is wrong"
        )
    return {**options, units_name: rank * ratio}


def convolution_config(options: Mapping[str, Any], hidden: int) -> ConvolutionConfig | None:
    """Convolutions around the layers' mixers and MLPs; None: there are none. Raises ValueError for
    sizes that do not fit."""
    if all(options.get(name) in (None, 0) for name in CONVOLUTION):
        return None
    taps, group = positive_integers(options, CONVOLUTION)
    if hidden % group:
        raise ValueError(f"conv_group_size {group} does not divide the hidden_size of {hidden}")
    return ConvolutionConfig(taps, group)


def logit_options(options: Mapping[str, Any], target: ModelConfig) -> tuple[float, float | None]:
    """What a head multiplies the LM head's logits by, and their soft cap. Those of the target are
    in its logits already: a head that names the same has none of its own.

    Raises ValueError for values that are none, and for other ones than the target's.
    """
    problems = Problems()
    for name in LOGITS:
        value = options.get(name)
        if value is not None and not is_positive_number(value):
            problems.add(f"{name} must be a positive number, got {shown(value)}")
    problems.raise_all()
    scale, cap = options.get("output_multiplier") or 1.0, options.get("final_logit_softcapping")
    if target.logit_divisor == 1 and target.logit_softcap is None:
        return scale, cap
    is_targets = math.isclose(scale * target.logit_divisor, 1) and cap == target.logit_softcap
    if not is_targets and any(options.get(name) is not None for name in LOGITS):
        raise ValueError(
            f"the block drafter does not fit the target: its output_multiplier {shown(scale)} and "
            f"final_logit_softcapping {shown(cap)} are not the target's "
            f"{shown(1 / target.logit_divisor)} and {shown(target.logit_softcap)}"
        )
    return 1.0, None


def confidence_config(
    options: Mapping[str, Any],
) -> Literal["output", "output and token"] | None:
    """What a head's confidence head reads; None: it has none."""
    enabled, with_markov = (check_flag(name, options.get(name, False)) for name in CONFIDENCE)
    if not enabled:
        return None
    return "output and token" if with_markov else "output"


def positive_integers(options: Mapping[str, Any], names: tuple[str, ...]) -> list[int]:
    """The values of options. Raises ValueError for those that are no positive integers."""
    problems, values = Problems(), [options.get(name) for name in names]
    for name, value in zip(names, values, strict=True):
        if not is_positive_integer(value):
            problems.add(f"{name} must be a positive integer, got {shown(value)}")
    problems.raise_all()
    return [int(value) for value in values if value is not None]


def dspark_options(head: BlockHead) -> dict[str, Any]:
    """The keys of a DSpark head, as DeepSpec writes them."""
    markov, confidence = head.markov, head.confidence
    options: dict[str, Any] = {"num_anchors": 0, "markov_rank": 0}
    if markov is not None:
        options |= {"markov_rank": markov.config.rank, "markov_head_type": markov.config.kind}
    options["enable_confidence_head"] = confidence is not None
    if confidence is not None:
        reads_token = confidence.weight.shape[1] > head.config.hidden_size
        options["confidence_head_with_markov"] = reads_token
    return options


def dflash2_options(head: BlockHead) -> dict[str, Any]:
    """The keys of a DFlash 2 head, as z-lab writes them in ``dflash_config``."""
    selector = head.correction
    assert isinstance(selector, Selector)
    options: dict[str, Any] = _convolution_options(head)
    options |= {"selector_rank": selector.config.rank, "selector_top_k": selector.candidates}
    values = head.logit_scale, head.logit_softcap
    given = zip(LOGITS, values, (1.0, None), strict=True)
    return options | {name: value for name, value, usual in given if value != usual}


def lilicorr_options(head: BlockHead) -> dict[str, Any]:
    """The keys of a LiLiCorr head in ``dflash_config``."""
    assert isinstance(head.correction, LiLiCorr)
    config = head.correction.config
    sizes = config.candidates, config.layers, config.heads, config.factor
    numbers = config.units / config.hidden, config.vector_eps, config.logit_scale
    options: dict[str, Any] = {"lilicorr_enabled": True, "lilicorr_hidden_size": config.hidden}
    options |= zip(LILICORR_SIZES, sizes, strict=True)
    options |= zip(LILICORR_NUMBERS, numbers, strict=True)
    return options | _convolution_options(head)


def domino_options(head: BlockHead) -> dict[str, Any]:
    """The keys of a Domino head in ``dflash_config``."""
    assert isinstance(head.correction, Domino)
    config = head.correction.config
    options: dict[str, Any] = dict(zip(DOMINO_SIZES, (config.state, config.rank), strict=True))
    return options | {
        "projector_type": "domino",
        "pure_draft_prefix_len": config.first,
        "shift_label": head.predicts_next,
    }


def xpress_options(head: BlockHead) -> dict[str, Any]:
    """The keys of an XPress head, at the top level."""
    assert isinstance(head.correction, XPress)
    config = head.correction.config
    options: dict[str, Any] = dict(zip(XPRESS_SIZES, (config.rank, config.units), strict=True))
    return options | {"xpress_block_size": config.block_size, "xpress_topc": 0}


def _convolution_options(head: BlockHead) -> dict[str, Any]:
    config = head.convolution
    if config is None:
        return {}
    return dict(zip(CONVOLUTION, (config.taps, config.group), strict=True))
