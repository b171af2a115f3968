"""How checkpoints name layers for multi-token prediction (MTP)."""

import dataclasses
import re
from collections.abc import Collection

from jaxspec.config.model import ModelConfig
from jaxspec.config.mtp import MtpConfig

NORM = "model.norm.weight"  # the model's final norm

_JOINED = re.compile(r"(model\.layers\.\d+\.)eh_proj\.weight")
_OF_MIMO = re.compile(r"(model\.mtp_layers\.\d+\.)input_proj\.weight")
_OF_ERNIE = re.compile(r"(model\.mtp\.\d+\.)linear_proj\.weight")
_OF_DEEPSEEK_V4 = re.compile(r"(mtp\.\d+\.)e_proj\.weight")
_OF_MINIMAX_M3 = re.compile(r"(model\.mtp\.layers\.\d+\.)eh_proj\.weight")
_OF_NEMOTRON = re.compile(r"(mtp\.)layers\.0\.eh_proj\.weight")


@dataclasses.dataclass(frozen=True)
class MtpNames:
    """What a checkpoint calls the parts of an MTP layer.

    Attributes:
      prefix: of all its tensors.
      layer: prefix of those of the transformer layer.
      embed_norm, hidden_norm, fc, norm: the rest of the others' names, without ``weight``. ``norm``
        None: the layer's last norm is the model's.
      hidden_fc: that of a projection of the hidden state by itself; ``fc`` is the embedding's then.
        None: there is one for both.
      hidden_first: the projection reads the hidden state before the embedding.
      copies: tensors that repeat the target's embeddings and LM head. They are not read.
      lm_head: the rest of the name of an LM head that may have other values than the target's, and
        is read then.
    """

    prefix: str
    layer: str
    embed_norm: str
    hidden_norm: str
    fc: str
    norm: str | None
    hidden_fc: str | None = None
    hidden_first: bool = False
    copies: tuple[str, ...] = ()
    lm_head: str | None = None

    @property
    def norm_name(self) -> str:
        """The whole name of the layer's last norm."""
        return NORM if self.norm is None else f"{self.prefix}{self.norm}.weight"

    def have(self, name: str) -> bool:
        """Whether a tensor is of this layer, and not of another MTP layer."""
        if name == self.norm_name:
            return True
        others = name.startswith(f"{self.prefix}layers.") and not name.startswith(self.layer)
        return name.startswith(self.prefix) and not others


_OF_QWEN = MtpNames(
    prefix="mtp.",
    layer="mtp.layers.0.",
    embed_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    fc="fc",
    norm="norm",
)
# The norm is that of streams, which are folded.
_OF_QWEN4_EXP = dataclasses.replace(
    _OF_QWEN,
    fc="fc_embedding",
    norm="layers.0.hyper_connection_mixer.hc_norm",
    hidden_fc="fc_hidden",
)


def mtp_names(mtp: MtpConfig, num_layers: int, index: int = 0) -> MtpNames:
    """The names of MTP layer ``index`` of a model of ``num_layers`` layers.

    Raises ValueError for an index above 0 of a layout in which the layers share a projection.
    """
    match mtp.layout:
        case "deepseek":
            layer, head = f"model.layers.{num_layers + index}.", "shared_head.head"
            copies = ("embed_tokens.weight", f"{head}.weight")
            return MtpNames(
                layer,
                layer,
                embed_norm="enorm",
                hidden_norm="hnorm",
                fc="eh_proj",
                norm="shared_head.norm",
                copies=copies[:1] if mtp.own_heads else copies,
                lm_head=head if mtp.own_heads else None,
            )
        case "deepseek_v4":
            layer = f"mtp.{index}."
            names = "enorm", "hnorm", "e_proj", "norm", "h_proj"
            return MtpNames(layer, layer, *names)
        case "mimo":
            layer = f"model.mtp_layers.{index}."
            return MtpNames(
                layer,
                layer,
                embed_norm="token_layernorm",
                hidden_norm="hidden_layernorm",
                fc="input_proj",
                norm="final_layernorm",
                hidden_first=True,
            )
        case "ernie":
            prefix = f"model.mtp.{index}."
            return MtpNames(
                prefix,
                layer=f"{prefix}block.",
                embed_norm="emb_norm",
                hidden_norm="hidden_norm",
                fc="linear_proj",
                norm=None,
            )
        case "minimax_m3":
            prefix = f"model.mtp.layers.{index}."
            names = "enorm", "hnorm", "eh_proj", "final_layernorm"
            return MtpNames(prefix, f"{prefix}transformer_layer.", *names)
        case "nemotron":
            return MtpNames(
                "mtp.",
                "mtp.layers.0.",
                *("layers.0.enorm", "layers.0.hnorm"),
                fc="layers.0.eh_proj",
                norm="layers.0.final_layernorm",
            )
        case "qwen" | "qwen4_exp":
            if index:
                raise ValueError("MTP layers that share a projection draft with the first only")
            return _OF_QWEN if mtp.layout == "qwen" else _OF_QWEN4_EXP


def mtp_prefixes(mtp: MtpConfig, num_layers: int) -> tuple[str, ...]:
    """Prefixes of the tensors of all MTP layers, which are no part of the model."""
    shared = mtp.layout in ("qwen", "qwen4_exp")  # those share a prefix
    count = 1 if shared else mtp.num_layers
    return tuple(mtp_names(mtp, num_layers, index).prefix for index in range(count))


def mtp_tensors(config: ModelConfig, names: Collection[str]) -> set[str]:
    """Those of MTP layers, which are no part of the model: those that the config names, layers
    after the model's own that have an ``eh_proj``, and those of DeepSeek-V4, ERNIE, MiMo, MiniMax
    M3 and Nemotron even if the config counts none."""
    prefixes = set() if config.mtp is None else {*mtp_prefixes(config.mtp, config.num_layers)}
    others = _OF_DEEPSEEK_V4, _OF_ERNIE, _OF_MIMO, _OF_MINIMAX_M3, _OF_NEMOTRON
    for joined in (_JOINED, *others):
        prefixes |= {match[1] for name in names if (match := joined.fullmatch(name))}
    prefixes -= {f"model.layers.{index}." for index in range(config.num_layers)}
    return {name for name in names if name.startswith(tuple(prefixes))}
