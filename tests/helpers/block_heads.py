"""Block heads for tests: random ones, and some that guess a random target's tokens."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config.model import ModelConfig, draft_layers
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import BlockDrafter, MixedDrafter, NGramDrafter, SuffixDrafter
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import (
    BlockConfig,
    BlockHead,
    Confidence,
    MarkovConfig,
    block_head_shapes,
)
from jaxspec.models.heads.convolutions import (
    Convolution,
    ConvolutionConfig,
    ConvolvedMixer,
    ConvolvedMlp,
    context_mixer,
)
from jaxspec.models.heads.corrections import (
    CorrectionConfig,
    DominoConfig,
    LiLiCorr,
    LiLiCorrConfig,
    RecurrentMarkov,
    Selector,
    SelectorConfig,
    XPressConfig,
)
from jaxspec.models.linear import Linear
from tests.helpers.random_models import (
    CONFIG,
    as_dtype,
    noisy,
    random_arrays,
    random_target,
    scaled,
    times,
)

MASK = 95  # a token of the target's
KINDS = ("dflash", "dspark")


class Extra(NamedTuple):
    """What a kind of head has beside DFlash's layers."""

    correction: CorrectionConfig | None = None
    convolution: ConvolutionConfig | None = None
    predicts_next: bool = False


SIZE = CONFIG.hidden_size
LATTICE = LiLiCorrConfig(
    candidates=8, hidden=20, layers=2, heads=2, units=30, factor=7, depths=5,
    vector_eps=1e-4, logit_scale=4.0, eps=1e-5,
)  # fmt: skip
EXTRAS: Mapping[str, Extra] = MappingProxyType(
    {
        "dflash": Extra(),
        "dspark": Extra(MarkovConfig(SIZE), predicts_next=True),
        "gated": Extra(MarkovConfig(SIZE, "gated"), predicts_next=True),
        "rnn": Extra(MarkovConfig(SIZE, "rnn"), predicts_next=True),
        "domino": Extra(DominoConfig(state=12, rank=9, first=1)),
        "xpress": Extra(XPressConfig(rank=9, units=18, block_size=6)),
        "lilicorr": Extra(LATTICE, ConvolutionConfig(taps=2, group=4)),
        "dflash2": Extra(SelectorConfig(rank=7, candidates=9), ConvolutionConfig(taps=3, group=8)),
    }
)
CORRECTED = tuple(kind for kind in EXTRAS if kind not in KINDS)
# DFlash with windows and causal layers, with causal ones alone, heads with a reduced vocabulary,
# MiMo's.
OTHERS = ("windowed", "causal", "reduced dflash", "reduced dspark", "mimo")
WINDOW = 7
LOOKUPS = {"ngram": NGramDrafter, "suffix": SuffixDrafter}


def block_target(config: ModelConfig = CONFIG, seed: int = 0, mark: float = 2.0) -> Decoder:
    """A random target. Embeddings have one coordinate by which the mask differs from all others:
    ``mark``, which must be clearer the wider the model is."""
    target = random_target(config, seed)
    embed = np.array(target.embed)
    embed[: config.vocab_size, 0] = np.where(np.arange(config.vocab_size) == MASK, -mark, mark)
    return target.replace(embed=jax.device_put(embed))


def random_head(
    target: ModelConfig,
    kind: str,
    *,
    layers: int = 2,
    capture: tuple[int, ...] = (0, 1),
    block_size: int = 6,
    seed: int = 5,
    confidence: bool = False,
) -> BlockHead:
    """A head of random weights with Qwen3's layers, ``kind`` one of EXTRAS or OTHERS."""
    kind = kind.removeprefix("reduced ")  # see guessing_head
    extra = EXTRAS.get(kind, Extra())
    if kind == "dspark":
        extra = extra._replace(correction=MarkovConfig(target.hidden_size))
    model = draft_layers(target, layers, 40).map_layers(
        lambda layer: dataclasses.replace(
            layer,
            mixer=dataclasses.replace(
                layer.attention,
                qk_norm=True,
                window=WINDOW if kind in ("windowed", "mimo") else None,
                sinks=kind == "mimo",
            ),
        )
    )
    config = BlockConfig(
        model=dataclasses.replace(model, stop_token_ids=()),
        capture=capture,
        block_size=block_size,
        mask_token=MASK,
        predicts_next=extra.predicts_next,
        correction=extra.correction,
        convolution=extra.convolution,
        causal="windows" if kind == "windowed" else "all" if kind == "causal" else "none",
        mask_embedding=kind == "mimo",
        confidence="output and token" if confidence else None,
    )
    return random_arrays(block_head_shapes(config, target, jnp.dtype(jnp.float32)), seed)


def guessing_head(target: Decoder, kind: str, noise: float = 0.05) -> BlockHead:
    """Masks attend to the last token, more than to others, and copy its embedding: so the first
    guess is often right. DSpark's Markov head knows what mostly follows a token.

    Computed by NumPy: of jax each step would be a program.
    """
    head = random_head(target.config, kind, layers=1)
    [layer] = head.layers
    mixer: Any = context_mixer(layer)
    hidden, groups, per_group, head_dim = mixer.qkv.weight.shape
    slow, copies = head_dim // 2 - 1, np.eye(hidden).reshape(groups, 1, head_dim, hidden)
    weight = 0.3 * np.asarray(mixer.qkv.weight)  # what is left of keys makes the context matter
    weight[:, :, :-2] = 0
    weight[0, :, :-2, slow], weight[0, :, -2, slow] = -1, 1
    weight[:, :, -1] = np.eye(hidden).reshape(hidden, groups, head_dim)
    o = 12 * np.repeat(copies, per_group - 2, axis=1).reshape(-1, hidden) / (per_group - 2)
    mixer = mixer.replace(
        qkv=mixer.qkv.replace(weight=jnp.asarray(weight)),
        o=mixer.o.replace(weight=as_dtype(o, np.float32)),
        q_norm=jnp.asarray(np.full(mixer.q_norm.shape, 4, np.float32)),
    )
    mlp: Any = layer.mlp.mlp if isinstance(layer.mlp, ConvolvedMlp) else layer.mlp
    mlp = mlp.replace(down=scaled(mlp.down, 0.1))
    if isinstance(layer.mixer, ConvolvedMixer) and isinstance(layer.mlp, ConvolvedMlp):
        mixer = layer.mixer.replace(mixer=mixer, convolution=_slight(layer.mixer.convolution))
        mlp = layer.mlp.replace(mlp=mlp, convolution=_slight(layer.mlp.convolution))
    head = head.replace(layers=(layer.replace(mixer=mixer, mlp=mlp),))
    if isinstance(head.correction, Selector):  # its scores are as large as small differences
        tables = {"before": head.correction.before, "after": head.correction.after}
        tables = {name: times(4, table) for name, table in tables.items()}
        head = head.replace(correction=head.correction.replace(**tables))
    if isinstance(head.correction, LiLiCorr):
        head = head.replace(correction=_likeliest_first(head.correction))
    if head.markov is not None:
        assert target.lm_head is not None
        embed = np.asarray(target.embed)[: target.config.vocab_size]
        size = np.sqrt(np.mean(embed * embed, axis=1, keepdims=True))
        after = np.asarray(target.lm_head.weight).T[: target.config.vocab_size]
        markov = head.markov.replace(before=jnp.asarray(embed / size), after=jnp.asarray(after))
        if isinstance(markov, RecurrentMarkov):  # its result is the vector, mostly
            weight = 0.05 * np.asarray(markov.joint.weight)
            weight[hidden : 2 * hidden, 2 * hidden :] = 0.3 * np.eye(hidden)
            joint = markov.joint.replace(
                weight=jnp.asarray(weight), bias=jnp.zeros(3 * hidden, jnp.float32)
            )
            markov = markov.replace(joint=joint, after=jnp.asarray(after / np.float32(0.3)))
        head = head.replace(correction=markov, norm=times(0.2, head.norm))
    if kind == "mimo":
        head = head.replace(mask_embedding=times(0.9, target.embed[MASK]))
    if kind.startswith("reduced"):
        head = with_draft_vocabulary(head, target, np.arange(0, target.config.vocab_size, 2))
    return noisy(head, noise)


def with_draft_vocabulary(head: BlockHead, target: Decoder, ids: np.ndarray) -> BlockHead:
    """The head with rows of the target's LM head, and of its Markov head's, for these ids."""
    assert target.lm_head is not None
    rows = jnp.asarray(np.asarray(target.lm_head.weight)[:, ids])
    lm_head = Linear(weight=rows, axes=("hidden", "draft_ids"))
    if head.markov is not None:
        markov = head.markov.replace(after=jnp.asarray(np.asarray(head.markov.after)[ids]))
        head = head.replace(correction=markov)
    return head.replace(lm_head=lm_head, token_ids=jnp.asarray(ids, jnp.int32))


def _likeliest_first(lattice: LiLiCorr) -> LiLiCorr:
    """Candidates follow others the better the likelier they are: one entry of incoming vectors is
    large for the first."""
    ranks = np.array(lattice.ranks)
    ranks[0, 0, 0, :, 0] = np.where(np.arange(ranks.shape[3]) == 0, 9, -9)
    changed = {}
    for name in ("outgoing", "incoming", "root_outgoing", "factors"):
        linear = getattr(lattice, name)
        weight, bias = 0.3 * np.asarray(linear.weight), np.zeros(linear.weight.shape[1])
        if name in ("factors", "incoming"):
            weight[0, 0] = 3
        else:
            bias[0] = 3
        changed[name] = linear.replace(weight=jnp.float32(weight), bias=jnp.float32(bias))
    return lattice.replace(ranks=jnp.asarray(ranks), **changed)


def _slight(convolution: Convolution) -> Convolution:
    """Tokens are mostly as they were."""
    base = 0.1 * np.asarray(convolution.base)
    base[:, 0] += 1
    return convolution.replace(base=jnp.asarray(base), said=scaled(convolution.said, 0.05))


def with_confidence(head: BlockHead, seed: int = 7) -> BlockHead:
    """The head with a random confidence head."""
    width = head.config.hidden_size + (0 if head.markov is None else head.markov.config.rank)
    weight = jax.random.normal(jax.random.key(seed), (1, width)) * width**-0.5
    return head.replace(confidence=Confidence(weight=weight, bias=jnp.full(1, 0.5)))


def block_params(
    kind: str,
    speculation: SpeculationConfig,
    target: Decoder | None = None,
    *,
    confidence: bool = False,
) -> EngineParams:
    """A guessing head of one of KINDS or OTHERS, after ``ngram+`` or ``suffix+`` mixed with
    lookup."""
    target = block_target() if target is None else target
    lookup, _, kind = kind.rpartition("+")
    head = guessing_head(target, kind)
    drafter: Any = BlockDrafter(head=with_confidence(head) if confidence else head)
    if lookup:
        drafter = MixedDrafter(model=drafter, lookup=LOOKUPS[lookup](min_match=2))
    return EngineParams(target=target, drafter=drafter, speculation=speculation)


def arrays_equal(ours: Any, theirs: Any) -> bool:
    """Whether two trees have the same structure and the same bits."""
    if jax.tree.structure(ours) != jax.tree.structure(theirs):
        return False
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)
