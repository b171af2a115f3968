"""EAGLE-3 heads (arXiv 2503.01840) and their 3.1 options (arXiv 2605.09992).

They read hidden states of several target layers, fused by ``fc``, and most have their own LM head,
over a reduced vocabulary. EAGLE-3.1 heads can norm the captured states before they are fused.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.config.model import ModelConfig
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.heads.config import HeadConfig
from jaxspec.models.heads.head import FrontOutput, FrontShape
from jaxspec.models.layer import Layer
from jaxspec.models.linear import Linear, linear_shape
from jaxspec.models.norms import rms_norm
from jaxspec.models.shapes import vector
from jaxspec.models.tensors import One, TensorMap
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.selection import Kernels


@pytree
class Eagle3Front(Pytree):
    """The first layer's mixer reads the normed embedding and the normed hidden state, concatenated.

    Attributes:
      fc: [C, H], fuses the captured states.
      hidden_norm: norm of the hidden state, before the first layer.
      fc_norms: EAGLE-3.1's ``fc_norm``: a norm for each captured state; () for none.
      input_norm: EAGLE-3.1's ``norm_before_fc``: one norm over all captured states [C].
      norm_before_residual: the residual stream starts from the normed hidden state.
    """

    fc: Linear
    hidden_norm: Array = array("hidden")
    fc_norms: tuple[Array, ...] = ()
    input_norm: Array | None = array("features")
    norm_before_residual: bool = static(default=False)

    method, norm_name, lm_head_name = "eagle3", "norm.weight", "lm_head"

    def hidden(self, captured: Array, eps: float, kernels: Kernels) -> Array:
        """Fuse captured states: [..., C] -> [..., H]."""
        with jax.named_scope("fc"):
            if self.fc_norms:
                states = jnp.split(captured, len(self.fc_norms), axis=-1)
                pairs = zip(states, self.fc_norms, strict=True)
                captured = jnp.concatenate([rms_norm(x, norm, eps) for x, norm in pairs], axis=-1)
            return self.fc(rms_norm(captured, self.input_norm, eps), kernels)

    def __call__(
        self, embedded: Array, hidden: Array, first: Layer, step: ForwardPass
    ) -> FrontOutput:
        normed = step.norm(hidden, self.hidden_norm)
        both = jnp.concatenate([step.norm(embedded, first.input_norm), normed], axis=-1)
        return FrontOutput(normed if self.norm_before_residual else hidden, both)

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "Eagle3Front":
        norms: list[Any] = [
            tensor_map.array(f"fc_norm.{index}.weight", norm)
            for index, norm in enumerate(self.fc_norms)
        ]
        return self.replace(
            fc=tensor_map.linear(self.fc, One("fc")),
            hidden_norm=tensor_map.array(f"{prefix}hidden_norm.weight", self.hidden_norm),
            fc_norms=tuple(norms),
            input_norm=tensor_map.array("input_norm.weight", self.input_norm),
        )


def eagle3_front_shape(head: HeadConfig, target: ModelConfig, dtype: jnp.dtype) -> FrontShape:
    """A front of ShapeDtypeStructs."""
    hidden, features = head.model.hidden_size, target.hidden_size * len(head.capture)
    norms: list[Any] = [vector(target.hidden_size, dtype) for _ in head.capture]
    front = Eagle3Front(
        fc=linear_shape(("features", "hidden"), (features, hidden), dtype, bias=head.fc_bias),
        hidden_norm=vector(hidden, dtype),
        fc_norms=tuple(norms) if head.fc_norm else (),
        input_norm=vector(features, dtype, when=head.norm_before_fc),
        norm_before_residual=head.norm_before_residual,
    )
    return FrontShape(
        front,
        mixer_input_size=2 * hidden,
        norms_input=True,
        has_norm=True,
        has_lm_head=head.has_lm_head,
    )
