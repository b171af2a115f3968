"""MTP layers of checkpoints as draft heads (DeepSeek-V3, arXiv 2412.19437; MiMo, 2505.07608; Qwen).

A projection joins the normed embedding of a token and the normed hidden state of the token before.
A layer like the model's follows, and a norm. Embeddings and the LM head are the target's.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.config.model import ModelConfig
from jaxspec.config.mtp import BEFORE, MtpConfig, MtpStates
from jaxspec.config.streams import GatedStreamsConfig
from jaxspec.models.decoder import FINAL_NORM, STREAMS
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.heads.config import HeadConfig
from jaxspec.models.heads.head import DraftHead, FrontOutput, FrontShape
from jaxspec.models.json.mtp_names import MtpNames, mtp_names
from jaxspec.models.layer import Layer
from jaxspec.models.linear import Linear, linear_shape
from jaxspec.models.norms import rms_norm
from jaxspec.models.shapes import vector
from jaxspec.models.tensors import One, TensorMap
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.selection import Kernels


def mtp_head_config(
    target: ModelConfig, mtp: MtpConfig, index: int = 0, *, has_lm_head: bool = False
) -> HeadConfig:
    """The HeadConfig of MTP layer ``index`` of a target; ``has_lm_head``: with an LM head of its
    own.

    Raises ValueError for a target of recurrent layers only, for states that layers of several
    residual streams do not read, and as ``mtp_names``.
    """
    layers = [layer for layer in target.layers if not layer.is_recurrent]
    like = mtp.layers[index : index + 1] or tuple(layers[-1:])
    if not like:
        raise ValueError("MTP layers have attention, and the model has none to take sizes from")
    capture = FINAL_NORM if mtp.states.target_normed else target.num_layers
    if mtp.layout in ("deepseek_v4", "qwen4_exp"):
        capture = STREAMS
        if mtp.states != BEFORE:
            raise ValueError("MTP layers of several residual streams read these before their norm: "
                f"{mtp.states.name} is not possible, choose the drafter mtp")  # fmt: skip
    model = dataclasses.replace(target, layers=like, mtp=None, stop_token_ids=())
    return HeadConfig(
        model=model,
        method="mtp",
        capture=(capture,),
        has_lm_head=has_lm_head,
        norm_output=mtp.states.draft_normed,
        mtp=mtp_names(mtp, target.num_layers, index),
    )


def mtp_states(head: DraftHead) -> MtpStates:
    """The hidden states that an MTP layer reads."""
    return MtpStates(target_normed=head.capture == (FINAL_NORM,), draft_normed=head.recycle_normed)


class _NamedFront:
    """What the fronts of MTP layers have in common. Their hidden states are those captured."""

    names: MtpNames

    method = "mtp"

    @property
    def norm_name(self) -> str:
        return self.names.norm_name

    @property
    def lm_head_name(self) -> str:
        return f"{self.names.prefix}{self.names.lm_head}"

    def hidden(self, captured: Array, eps: float, kernels: Kernels) -> Array:
        """The captured state, or the captured streams [..., N * H]."""
        return captured


@pytree
class MtpFront(_NamedFront, Pytree):
    """The first layer reads ``fc`` [2 * H, H] of a normed embedding and a normed hidden state."""

    fc: Linear
    embed_norm: Array = array("hidden")
    hidden_norm: Array = array("hidden")
    names: MtpNames = static()

    def __call__(
        self, embedded: Array, hidden: Array, first: Layer, step: ForwardPass
    ) -> FrontOutput:
        parts = [step.norm(embedded, self.embed_norm), step.norm(hidden, self.hidden_norm)]
        if self.names.hidden_first:
            parts.reverse()
        with jax.named_scope("fc"):
            x = self.fc(jnp.concatenate(parts, axis=-1), step.kernels)
        return FrontOutput(x, step.norm(x, first.input_norm))

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "MtpFront":
        names = self.names

        def norm(name: str, weight: Array) -> Array:
            return tensor_map.norm(f"{names.prefix}{name}.weight", weight)

        return self.replace(
            fc=tensor_map.linear(self.fc, One(f"{names.prefix}{names.fc}")),
            embed_norm=norm(names.embed_norm, self.embed_norm),
            hidden_norm=norm(names.hidden_norm, self.hidden_norm),
        )


@pytree
class StreamsMtpFront(_NamedFront, Pytree):
    """The first layer reads N streams: ``fc`` [H, H] of a normed embedding, plus ``hidden_fc``
    [H, H] of each stream of the token before, normed. Hidden states are streams side by side."""

    fc: Linear
    hidden_fc: Linear
    embed_norm: Array = array("hidden")
    hidden_norm: Array = array("hidden")
    names: MtpNames = static()

    def __call__(
        self, embedded: Array, hidden: Array, first: Layer, step: ForwardPass
    ) -> FrontOutput:
        batch, size, width = embedded.shape
        streams = self._normed(hidden, width, step)
        with jax.named_scope("fc"):
            of_token = self.fc(step.norm(embedded, self.embed_norm), step.kernels)
            of_streams = self.hidden_fc(streams, step.kernels)
        x = of_token[:, :, None] + of_streams.reshape(batch, size, -1, width)
        return FrontOutput(x, of_token)  # layers of streams norm what they read by themselves

    def _normed(self, hidden: Array, width: int, step: ForwardPass) -> Array:
        """Streams [B, T * N, H] of hidden states [B, T, N * H]."""
        return step.norm(hidden.reshape(len(hidden), -1, width), self.hidden_norm)

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "StreamsMtpFront":
        names, module = self.names, self.names.prefix
        return self.replace(
            fc=tensor_map.linear(self.fc, One(f"{module}{names.fc}")),
            hidden_fc=tensor_map.linear(self.hidden_fc, One(f"{module}{names.hidden_fc}")),
            embed_norm=tensor_map.norm(f"{module}{names.embed_norm}.weight", self.embed_norm),
            hidden_norm=tensor_map.norm(f"{module}{names.hidden_norm}.weight", self.hidden_norm),
        )


@pytree
class GatedStreamsMtpFront(StreamsMtpFront):
    """The same for streams that are read through gates: the hidden norm [N * H] is of all streams
    as one vector."""

    hidden_norm: Array = array("features")

    def _normed(self, hidden: Array, width: int, step: ForwardPass) -> Array:
        """Streams [B, T * N, H] of hidden states [B, T, N * H]."""
        return rms_norm(hidden, self.hidden_norm, step.eps).reshape(len(hidden), -1, width)


def _of_streams(head: HeadConfig, names: MtpNames, dtype: jnp.dtype) -> FrontShape:
    hidden, streams = head.model.hidden_size, head.model.layers[0].streams
    linear = linear_shape(("features", "hidden"), (hidden, hidden), dtype)
    kind, entries = StreamsMtpFront, hidden
    if isinstance(streams, GatedStreamsConfig):
        kind, entries = GatedStreamsMtpFront, streams.count * hidden
    front = kind(
        fc=linear,
        hidden_fc=linear,
        embed_norm=vector(hidden, dtype),
        hidden_norm=vector(entries, dtype),
        names=names,
    )
    return FrontShape(
        front,
        mixer_input_size=hidden,
        norms_input=True,
        has_norm=head.model.has_norm,
        has_lm_head=False,
    )


def mtp_front_shape(head: HeadConfig, dtype: jnp.dtype) -> FrontShape:
    """A front of ShapeDtypeStructs."""
    hidden = head.model.hidden_size
    assert head.mtp is not None
    if head.mtp.hidden_fc is not None:
        return _of_streams(head, head.mtp, dtype)
    front = MtpFront(
        fc=linear_shape(("features", "hidden"), (2 * hidden, hidden), dtype, bias=head.fc_bias),
        embed_norm=vector(hidden, dtype),
        hidden_norm=vector(hidden, dtype),
        names=head.mtp,
    )
    return FrontShape(
        front,
        mixer_input_size=hidden,
        norms_input=True,
        has_norm=True,
        has_lm_head=head.has_lm_head,
    )
