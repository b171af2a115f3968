"""LiLiCorr (arXiv 2608.20530): a small transformer over the likeliest tokens of all depths.

It reads all candidates of a block at once, each with its embedding, the block's output at its depth
and its probability, and gives each two vectors. How well a candidate follows another is the cosine
of one's outgoing and the other's incoming vector. The root has an outgoing vector, too, which is
made of the context's last token.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.models import decoder
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads.corrections.base import Lattice, PairScores
from jaxspec.models.linear import Linear, linear_shape
from jaxspec.models.norms import rms_norm
from jaxspec.models.shaped_tensors import shaped
from jaxspec.models.shapes import array_shape, vector
from jaxspec.models.tensors import One, TensorMap
from jaxspec.parallel.bytes import local_bytes
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.products import einsum_f32

FEATURES = 5  # of a candidate: see _features
FEATURE_EPS = 1e-5
AXES = ("features", "units")


@dataclasses.dataclass(frozen=True)
class LiLiCorrConfig:
    """Sizes and constants of a lattice transformer.

    Attributes:
      candidates: of each depth.
      hidden, layers, heads, units: of the transformer; ``units`` are those of its MLPs.
      factor: entries of the vectors that are compared.
      depths: the most tokens that a block drafts.
      vector_eps: the least size that a vector is divided by.
      logit_scale: what cosines are multiplied by.
      eps: of its RMS norms.
    """

    candidates: int
    hidden: int
    layers: int
    heads: int
    units: int
    factor: int
    depths: int
    vector_eps: float
    logit_scale: float
    eps: float

    def shape(self, hidden: int, vocab: int, dtype: jnp.dtype) -> "LiLiCorr":
        """The transformer of ShapeDtypeStructs."""
        width = self.hidden

        def linear(read: int, out: int) -> Linear:
            return linear_shape(AXES, (read, out), dtype, bias=True)

        layer = LatticeLayer(
            attn_norm=vector(width, dtype),
            qkv=array_shape(3 * width, width, dtype=dtype),
            qkv_bias=vector(3 * width, dtype),
            out=linear(width, width),
            mlp_norm=vector(width, dtype),
            up=linear(width, self.units),
            down=linear(self.units, width),
        )
        return LiLiCorr(
            token=None if width == hidden else linear(hidden, width),
            output=linear(hidden, width),
            feature_norm=vector(FEATURES, dtype),
            feature_bias=vector(FEATURES, dtype),
            feature_up=linear(FEATURES, width),
            feature_down=linear(width, width),
            slots=array_shape(1, 1, self.depths, 1, width, dtype=dtype),
            ranks=array_shape(1, 1, 1, self.candidates, width, dtype=dtype),
            relative=array_shape(self.heads, 2 * self.depths + 1, dtype=dtype),
            same=vector(self.heads, dtype),
            layers=(layer,) * self.layers,
            output_norm=vector(width, dtype),
            context=linear(hidden, width),
            context_norm=vector(width, dtype),
            factors=linear(3 * width, width),
            outgoing=linear(width, self.factor),
            incoming=linear(width, self.factor),
            root_outgoing=linear(width, self.factor),
            config=self,
        )


@pytree
class LatticeLayer(Pytree):
    """One layer: attention over all candidates in both directions, then an MLP without gates."""

    attn_norm: Array = array("features")
    qkv: Array = array("units", "features")  # [3 h, h], as in the checkpoint
    qkv_bias: Array = array("units")
    out: Linear
    mlp_norm: Array = array("features")
    up: Linear
    down: Linear

    def __call__(self, x: Array, bias: Array, eps: float) -> Array:
        """x [B, L, h] of L candidates; ``bias`` [heads, L, L] is added to scores."""
        read = rms_norm(x, self.attn_norm, eps)
        qkv = einsum_f32("blh,oh->blo", read, self.qkv) + self.qkv_bias
        q, k, v = jnp.moveaxis(qkv.reshape(*x.shape[:2], 3, len(bias), -1), 2, 0)
        scores = einsum_f32("blnd,bmnd->bnlm", q, k) * q.shape[-1] ** -0.5 + bias
        mixed = einsum_f32("bnlm,bmnd->blnd", jax.nn.softmax(scores), v)
        x = x + self.out(mixed.reshape(x.shape).astype(x.dtype))
        units = jax.nn.silu(self.up(rms_norm(x, self.mlp_norm, eps)))
        return x + self.down(units)

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "LatticeLayer":
        """The same, with every array replaced by ``tensor_map``'s result."""
        return self.replace(
            attn_norm=tensor_map.array(f"{prefix}attn_norm.weight", self.attn_norm),
            qkv=tensor_map.array(f"{prefix}attn.in_proj_weight", self.qkv),
            qkv_bias=tensor_map.array(f"{prefix}attn.in_proj_bias", self.qkv_bias),
            out=tensor_map.linear(self.out, One(f"{prefix}attn.out_proj")),
            mlp_norm=tensor_map.array(f"{prefix}mlp_norm.weight", self.mlp_norm),
            up=tensor_map.linear(self.up, One(f"{prefix}mlp.0")),
            down=tensor_map.linear(self.down, One(f"{prefix}mlp.2")),
        )


@pytree
class LiLiCorr(Pytree):
    """Weights of the lattice transformer, and a PairCorrection. They are whole on every device."""

    token: Linear | None  # None: embeddings are as wide as the transformer
    output: Linear
    feature_norm: Array = array("features")
    feature_bias: Array = array("features")
    feature_up: Linear
    feature_down: Linear
    slots: Array = array("two", "two", "depth", "two", "features")  # [1, 1, T, 1, h]
    ranks: Array = array("two", "two", "two", "units", "features")  # [1, 1, 1, K, h]
    relative: Array = array("units", "depth")  # [heads, 2 T + 1]
    same: Array = array("units")  # [heads]
    layers: tuple[LatticeLayer, ...]
    output_norm: Array = array("features")
    context: Linear
    context_norm: Array = array("features")
    factors: Linear
    outgoing: Linear
    incoming: Linear
    root_outgoing: Linear
    config: LiLiCorrConfig = static()

    @property
    def candidates(self) -> int:
        return self.config.candidates

    reads_sums = True  # features of candidates are of probabilities

    @jax.named_scope("lilicorr")
    def scores(self, target: Decoder, lattice: Lattice, roots: Array) -> PairScores:
        outputs, tokens, log_probs, context = lattice
        assert context is not None  # see BlockHead.reads_context
        config, (batch, depths, count) = self.config, tokens.shape
        embedded = decoder.plain_embed(target, tokens.reshape(batch, -1))
        embedded = embedded.reshape(*tokens.shape, -1).astype(outputs.dtype)
        x = embedded if self.token is None else self.token(embedded)
        x = x + self.output(outputs)[:, :, None] + self._features(log_probs).astype(x.dtype)
        x = x + self.slots[0, :, :depths] + self.ranks[0]  # [B, T, K, h]
        x, bias = x.reshape(batch, depths * count, -1), self._bias(depths)
        for layer in self.layers:
            x = layer(x, bias, config.eps)
        x = rms_norm(x, self.output_norm, config.eps).reshape(batch, depths, count, -1)
        # Of a single row XLA would compute elementwise products (see split_k_product).
        padded = jnp.pad(context[:, None], ((0, 0), (0, 1), (0, 0)))
        root = rms_norm(self.context(padded), self.context_norm, config.eps)  # [B, 2, h]
        around = jnp.broadcast_to(root[:, :1, None], x.shape)
        factors = jax.nn.silu(self.factors(jnp.concatenate([x, around, x * around], axis=-1)))
        outgoing, incoming = (
            self._unit(linear(factors)) for linear in (self.outgoing, self.incoming)
        )
        at_root = self._unit(self.root_outgoing(root))[:, 0]
        first = einsum_f32("bf,bkf->bk", at_root, incoming[:, 0])
        pairs = einsum_f32("btpf,btkf->btpk", outgoing[:, :-1], incoming[:, 1:])
        scale = config.logit_scale
        return PairScores(tokens=tokens, first=scale * first, pairs=scale * pairs)

    def _features(self, log_probs: Array) -> Array:
        """What candidates [B, T, K] are by their probabilities: float32 [B, T, K, h]."""
        count = log_probs.shape[-1]
        rank = jnp.arange(count, dtype=jnp.float32)
        behind = log_probs - log_probs.max(axis=-1, keepdims=True)
        rows = (log_probs, jnp.exp(log_probs), behind, rank / max(count - 1, 1), rank == 0)
        x = jnp.stack([jnp.broadcast_to(row, log_probs.shape) for row in rows], axis=-1)
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / jnp.sqrt((x * x).mean(axis=-1, keepdims=True) + FEATURE_EPS)
        x = (x * self.feature_norm + self.feature_bias).astype(self.feature_norm.dtype)
        return self.feature_down.float32(jax.nn.silu(self.feature_up(x)))

    def _bias(self, depths: int) -> Array:
        """What is added to the scores of attention, by depths alone: [heads, T * K, T * K]."""
        depth = jnp.repeat(jnp.arange(depths), self.config.candidates)
        distance = depth[:, None] - depth
        same = jnp.where(distance == 0, self.same[:, None, None], 0)
        return (self.relative[:, distance + self.config.depths] + same).astype(jnp.float32)

    def _unit(self, x: Array) -> Array:
        """Vectors of size 1, float32."""
        x = x.astype(jnp.float32)
        square = (x * x).sum(axis=-1, keepdims=True)
        # The gradient of a root is not finite at zero, which the vector of an empty context is.
        return x / jnp.sqrt(jnp.maximum(square, self.config.vector_eps**2))

    def bytes_read(self, steps: int) -> int:
        """All of them once."""
        return local_bytes(self)

    def mapped(self, tensor_map: TensorMap) -> "LiLiCorr":
        """The same, with every array replaced by ``tensor_map``'s result."""
        linears = {
            "token": "token_proj",
            "output": "pass_hidden_proj",
            "feature_up": "feature_mlp.1",
            "feature_down": "feature_mlp.3",
            "context": "context_proj",
            "factors": "factor_input_proj",
            "outgoing": "out_head",
            "incoming": "in_head",
            "root_outgoing": "anchor_out_head",
        }
        arrays = {
            "feature_norm": "feature_mlp.0.weight",
            "feature_bias": "feature_mlp.0.bias",
            "relative": "relative_slot_bias",
            "same": "same_slot_bias",
            "output_norm": "output_norm.weight",
            "context_norm": "anchor_norm.weight",
        }
        found: dict[str, Any] = {
            field: tensor_map.linear(getattr(self, field), One(f"lilicorr.{name}"))
            for field, name in linears.items()
        }
        for field, name in arrays.items():
            found[field] = tensor_map.array(f"lilicorr.{name}", getattr(self, field))
        return self.replace(
            slots=shaped(tensor_map, "lilicorr.slot_embedding", self.slots),
            ranks=shaped(tensor_map, "lilicorr.rank_embedding", self.ranks),
            layers=tuple(
                layer.mapped(f"lilicorr.layers.{index}.", tensor_map)
                for index, layer in enumerate(self.layers)
            ),
            **found,
        )
