"""What layers read of each token besides the residual stream: per-layer embeddings (Gemma 4's E
models)."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import Linear, Product, linear_shape
from jaxspec.models.norms import rms_norm
from jaxspec.models.shapes import array_shape, vector
from jaxspec.models.tensors import One, TensorMap
from jaxspec.parallel.pytree import Pytree, array, pytree


@pytree
class TokenTable(Pytree):
    """Weights that make the inputs of L layers, P entries each, of a token and its embedding.

    Vocabulary rows past the model's are padding.
    """

    embed: Array = array("vocab", "features")  # [V, L * P]
    projection: Linear  # [H, L * P]
    norm: Array = array("features")  # [P]

    def inputs(self, rows: Array, x: Array, hidden_size: int, step: ForwardPass) -> list[Array]:
        """The input [B, T, P] of each layer, of the table's rows [B, T, L * P] of the tokens and
        of their embeddings x [B, T, H], which may be split."""
        with jax.named_scope("embed"):
            width = self.norm.shape[0]
            projected = self.projection.product(x, "embed").result(step.layout, step.kernels)
            of_layers = (projected * _as(hidden_size**-0.5, x)).reshape(*x.shape[:2], -1, width)
            tokens = rows.reshape(of_layers.shape) * _as(width**0.5, x)
            both = (rms_norm(of_layers, self.norm, step.eps) + tokens) * _as(2**-0.5, x)
            return [both[:, :, layer] for layer in range(both.shape[2])]

    def mapped(self, tensor_map: TensorMap) -> "TokenTable":
        """The same, with every array replaced by ``tensor_map``'s result."""
        return self.replace(
            embed=tensor_map.array("model.embed_tokens_per_layer.weight", self.embed),
            projection=tensor_map.linear(self.projection, One("model.per_layer_model_projection")),
            norm=tensor_map.norm("model.per_layer_projection_norm.weight", self.norm),
        )


@pytree
class TokenInput(Pytree):
    """Weights of what one layer adds to the residual stream of its input of a token."""

    gate: Linear  # [H, P]
    projection: Linear  # [P, H]
    norm: Array = array("hidden")

    def __call__(self, x: Array, given: Array, step: ForwardPass) -> Product:
        """From the residual stream [B, T, H] and the layer's input [B, T, P] to the addend, which
        is not normed yet."""
        with jax.named_scope("mlp"):
            gates = self.gate.product(x, "mlp").result(step.layout, step.kernels)
            return self.projection.product(jax.nn.gelu(gates) * given, "mlp")

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "TokenInput":
        """The same, with every array replaced by ``tensor_map``'s result for layer ``prefix``."""
        return self.replace(
            gate=tensor_map.linear(self.gate, One(f"{prefix}per_layer_input_gate")),
            projection=tensor_map.linear(self.projection, One(f"{prefix}per_layer_projection")),
            norm=tensor_map.norm(f"{prefix}post_per_layer_input_norm.weight", self.norm),
        )


def token_table_shape(
    vocab: int, num_layers: int, width: int, hidden_size: int, dtype: jnp.dtype
) -> TokenTable:
    """A TokenTable of ShapeDtypeStructs, of so many rows and layers; ``width`` is P."""
    return TokenTable(
        embed=array_shape(vocab, num_layers * width, dtype=dtype),
        projection=linear_shape(("hidden", "features"), (hidden_size, num_layers * width), dtype),
        norm=vector(width, dtype),
    )


def token_input_shape(width: int, hidden_size: int, dtype: jnp.dtype) -> TokenInput:
    """A TokenInput of ShapeDtypeStructs; ``width`` is P."""
    return TokenInput(
        gate=linear_shape(("hidden", "features"), (hidden_size, width), dtype),
        projection=linear_shape(("features", "hidden"), (width, hidden_size), dtype),
        norm=vector(hidden_size, dtype),
    )


def _as(number: float, x: Array) -> Array:
    """A number in the dtype of x."""
    return jnp.asarray(number, x.dtype)
