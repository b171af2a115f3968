"""DFlash 2's convolutions: around the mixer and the MLP of every layer of a block head.

Each token of a block is mixed with the tokens before it in the block, twice: what mixer or MLP
reads, and what it gives. The taps are weights of the channel plus a part that the token's normed
input says for each group of channels. The context has no part in it: no tap reaches before the
block's first token, and keys and values of context tokens are made without.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.cache import Geometry
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.heads.block_context import AttendBeside
from jaxspec.models.layer import Layer
from jaxspec.models.linear import Computed, Linear, linear_shape
from jaxspec.models.mixers import Mixer
from jaxspec.models.mlps import Mlp
from jaxspec.models.shaped_tensors import shaped
from jaxspec.models.shapes import array_shape
from jaxspec.models.tensors import One, TensorMap
from jaxspec.parallel import Layout
from jaxspec.parallel.pytree import Pytree, array, pytree
from pallas_kernels.add_rms_norm.reference import followed_by
from pallas_kernels.products import added_up
from pallas_kernels.selection import NO_KERNELS, Kernels

Side = Literal[0, 1]  # what is read, what is given


@dataclasses.dataclass(frozen=True)
class ConvolutionConfig:
    """``taps`` of each token, itself included; ``group`` channels share the part that it says."""

    taps: int
    group: int

    def shape(self, hidden: int, dtype: jnp.dtype) -> "Convolution":
        """A convolution of ShapeDtypeStructs.

        Raises ValueError for channels that cannot be grouped evenly.
        """
        if hidden % self.group:
            raise ValueError(
                f"conv_group_size {self.group} does not divide the hidden size of {hidden}"
            )
        said = 2 * self.taps * hidden // self.group
        return Convolution(
            base=array_shape(2, self.taps, hidden, dtype=dtype),
            said=linear_shape(("features", "units"), (hidden, said), dtype),
        )


@pytree
class Convolution(Pytree):
    """Weights of the convolutions around one mixer or MLP, whole on every device.

    Attributes:
      base: taps of each channel, for both sides.
      said: [H, 2 * taps * groups], what a token's input adds to them.
    """

    base: Array = array("two", "table", "features")  # [2, taps, H]
    said: Linear

    @property
    def config(self) -> ConvolutionConfig:
        _, taps, hidden = self.base.shape
        return ConvolutionConfig(taps, 2 * taps * hidden // self.said.out_shape[0])

    @jax.named_scope("convolution")
    def taps(self, x: Array, kernels: Kernels = NO_KERNELS) -> Array:
        """Taps of block tokens by their normed input [B, T, H]: float32 [B, T, 2, taps, H]."""
        said = self._said(x, kernels).reshape(*x.shape[:2], *self.base.shape[:2], -1)
        return self.base + jnp.repeat(said, self.config.group, axis=-1)

    def _said(self, x: Array, kernels: Kernels) -> Array:
        """The product of ``said``, float32 [B, T, units]. On a GPU it is split, since it is narrow,
        and the launch that reads it adds up its parts."""
        splits = self.said.best_num_splits(x, kernels) if "add_rms_norm" in kernels else 1
        if splits == 1:
            return self.said.float32(x, kernels)
        return added_up(self.said.partial_sums(x, splits, kernels), len(x))

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "Convolution":
        """The same, with every array replaced by ``tensor_map``'s result."""
        return self.replace(
            base=shaped(tensor_map, f"{prefix}base_kernel", self.base),
            said=tensor_map.linear(self.said, One(f"{prefix}kernel_projection")),
        )


@jax.named_scope("convolution")
def convolved(x: Array, taps: Array, side: Side) -> Array:
    """Block tokens [B, T, H] mixed with those before them, by ``Convolution.taps``."""
    weights, size = taps[:, :, side], x.shape[1]  # [B, T, taps, H]
    before = jnp.pad(x, ((0, 0), (weights.shape[2] - 1, 0), (0, 0)))
    last = weights.shape[2] - 1
    parts = (
        weights[:, :, tap] * before[:, last - tap : last - tap + size] for tap in range(last + 1)
    )
    return sum(parts, jnp.zeros(x.shape, jnp.float32)).astype(x.dtype)


@pytree
class ConvolvedMixer(Pytree):
    """A mixer between convolutions of the block's tokens. Context tokens that a pass reads beside
    the block (see block_context.py) are left as they are."""

    mixer: Mixer
    convolution: Convolution

    def __call__(self, x: Array, state: Any, step: ForwardPass) -> tuple[Computed, Any]:
        block, beside, taps = x, None, self.convolution.taps(x, step.kernels)
        if isinstance(step.attend, AttendBeside):
            shape = step.attend.block.slots.shape
            size = math.prod(shape)  # a slice for the product of taps would be a copy
            block, taps = (part[0, :size].reshape(*shape, *part.shape[2:]) for part in (x, taps))
            beside = x[:, size:]
        read = followed_by(convolved(block, taps, 0), beside)
        product, state = self.mixer(read, state, step)
        return Computed(convolved(step.summed(block, product), taps, 1)), state

    @property
    def reader(self) -> None:
        """Nothing reads the input alone."""
        return None

    def init_state(self, geometry: Geometry, layout: Layout) -> Any:
        return self.mixer.init_state(geometry, layout)

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "ConvolvedMixer":
        """The same, with every array replaced by ``tensor_map``'s result."""
        return self.replace(
            mixer=self.mixer.mapped(prefix, tensor_map),
            convolution=self.convolution.mapped(f"{prefix}attention_conv.", tensor_map),
        )


@pytree
class ConvolvedMlp(Pytree):
    """An MLP between convolutions of the block's tokens."""

    mlp: Mlp
    convolution: Convolution

    def __call__(self, x: Array, step: ForwardPass) -> Computed:
        taps = self.convolution.taps(x, step.kernels)
        product = self.mlp(convolved(x, taps, 0), step)
        return Computed(convolved(step.summed(x, product), taps, 1))

    @property
    def reader(self) -> None:
        """Nothing reads the input alone."""
        return None

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "ConvolvedMlp":
        """The same, with every array replaced by ``tensor_map``'s result."""
        return self.replace(
            mlp=self.mlp.mapped(prefix, tensor_map),
            convolution=self.convolution.mapped(f"{prefix}mlp_conv.", tensor_map),
        )


def with_convolutions(layer: Layer, config: ConvolutionConfig | None, hidden: int) -> Layer:
    """A layer of ShapeDtypeStructs with convolutions around its mixer and its MLP; None: as it
    is."""
    if config is None:
        return layer
    assert layer.mixer is not None and layer.mlp is not None and layer.input_norm is not None
    convolution = config.shape(hidden, layer.input_norm.dtype)
    return layer.replace(
        mixer=ConvolvedMixer(mixer=layer.mixer, convolution=convolution),
        mlp=ConvolvedMlp(mlp=layer.mlp, convolution=convolution),
    )


def context_mixer(layer: Layer) -> Mixer | None:
    """What makes keys and values of context tokens: the layer's mixer, without convolutions."""
    mixer = layer.mixer
    return mixer.mixer if isinstance(mixer, ConvolvedMixer) else mixer
