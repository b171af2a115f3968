"""Gemma 4's assistants: drafters of a few layers that read the target's keys and values.

Layers have queries only, and keep nothing. In a round all steps have one position, that of the
newest token, and see what was committed before it: no more is known of drafted tokens than the
hidden state that the step before gives.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxspec.config.model import ModelConfig
from jaxspec.models import decoder
from jaxspec.models.attention_heads import LentKV
from jaxspec.models.decoder import Decoder
from jaxspec.models.forward_pass import Attend, make_pass
from jaxspec.models.layer import Layer, layer_shape, run_layers
from jaxspec.models.linear import Linear, linear_shape
from jaxspec.models.shapes import array_shape, vector
from jaxspec.models.tensors import One, TensorMap
from jaxspec.parallel import WHOLE, Layout, Shards, check_divides
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.products import einsum_f32
from pallas_kernels.selection import NO_KERNELS, Kernels


@dataclasses.dataclass(frozen=True)
class OrderedConfig:
    """An LM head whose rows are in groups around centroids, of which the ``chosen`` best are
    scored."""

    num_centroids: int
    chosen: int


@dataclasses.dataclass(frozen=True)
class AssistantConfig:
    """An assistant for a target.

    Attributes:
      model: its layers, each of SharedAttention.
      target_hidden_size: of the target's hidden states.
      sources: for each layer the index of the target's layer whose keys and values it reads.
      ordered: its LM head, if that is ordered.
    """

    model: ModelConfig
    target_hidden_size: int
    sources: tuple[int, ...]
    ordered: OrderedConfig | None = None


@pytree
class OrderedHead(Pytree):
    """An LM head that scores tokens of a few groups.

    Attributes:
      embed: a row for each token.
      tokens: int32, the tokens of each group; None while they are not read.
      chosen: groups that are scored.
    """

    centroids: Linear  # [h, C]
    embed: Array = array("embed_rows", "whole_hidden")  # [V, h]
    tokens: Array | None = array("routes", "draft_ids")  # [C, V / C]
    chosen: int = static()

    def logits(self, normed: Array) -> Array:
        """Float32 logits [B, T, V] of normed states [B, T, h]; -inf for tokens of other groups."""
        assert self.tokens is not None
        _, best = lax.top_k(self.centroids.float32(normed), self.chosen)
        ids = self.tokens[best].reshape(*normed.shape[:2], -1)
        scores = einsum_f32("bth,btnh->btn", normed, self.embed[ids])
        rest = jnp.full((*normed.shape[:2], len(self.embed)), -jnp.inf, scores.dtype)
        return jnp.put_along_axis(rest, ids, scores, axis=-1, inplace=False)


@pytree
class Assistant(Pytree):
    """Weights of an assistant. h is the width of its layers, H that of the target's."""

    entry: Linear  # [2 H, h]
    layers: tuple[Layer, ...]
    norm: Array = array("hidden")
    exit: Linear  # [h, H]
    lm_head: Linear | OrderedHead  # [h, V]
    config: AssistantConfig = static()
    layout: Layout = static(default=WHOLE)

    @property
    def dtype(self) -> jnp.dtype:
        return self.entry.dtype

    @property
    def vocab_layout(self) -> Layout:
        """How the last dimension of ``logits`` is split."""
        ordered = isinstance(self.lm_head, OrderedHead)
        return dataclasses.replace(self.layout, vocab=()) if ordered else self.layout

    def run(
        self,
        target: Decoder,
        tokens: Array,  # [B, T]
        hidden: Array,  # [B, T, H] of the tokens before
        positions: Array,  # [B, T] rotary positions
        lent: tuple[LentKV, ...],
        attend: Attend,
        kernels: Kernels = NO_KERNELS,
    ) -> tuple[Array, Array]:
        """One step: hidden states [B, T, H] for the next one, and what the LM head reads
        [B, T, h]. ``lent``: what each layer reads."""
        model = self.config.model
        both = jnp.concatenate([decoder.embed(target, tokens), hidden], axis=-1)
        with jax.named_scope("fc"):
            x = self.entry(both.astype(self.dtype), kernels)
        step = make_pass(model.layers, positions, attend, model.rms_norm_eps, self.layout, kernels)
        first = step.norm(x, self.layers[0].input_norm)
        _, normed, _ = run_layers(self.layers, x, first, lent, step, self.norm)
        with jax.named_scope("fc"):
            return self.exit(normed, kernels), normed

    def logits(self, normed: Array, kernels: Kernels = NO_KERNELS) -> Array:
        """This shard's float32 draft logits: [B, T, h] -> [B, T, V / shards]."""
        with jax.named_scope("lm_head"):
            if isinstance(self.lm_head, OrderedHead):
                return self.lm_head.logits(normed)
            return self.lm_head.float32(normed, kernels)

    def mapped(self, tensor_map: TensorMap) -> "Assistant":
        """The same, with every array replaced by ``tensor_map``'s result. The tokens of groups are
        None in the result: they are read as integers."""
        head, table = self.lm_head, "model.embed_tokens"
        if isinstance(head, OrderedHead):
            centroids = One("masked_embedding.centroids")
            made = head.replace(
                centroids=tensor_map.linear(head.centroids, centroids),
                embed=tensor_map.array(f"{table}.weight", head.embed),
                tokens=None,
            )
        else:
            made = tensor_map.linear(head, One(table))
        return self.replace(
            entry=tensor_map.linear(self.entry, One("pre_projection")),
            layers=tuple(
                layer.mapped(f"model.layers.{index}.", tensor_map)
                for index, layer in enumerate(self.layers)
            ),
            norm=tensor_map.norm("model.norm.weight", self.norm),
            exit=tensor_map.linear(self.exit, One("post_projection")),
            lm_head=made,
        )


def assistant_shapes(config: AssistantConfig, dtype: jnp.dtype, shards: Shards) -> Assistant:
    """An Assistant of ShapeDtypeStructs. Heads are split as the target's are.

    Raises ValueError for sizes that cannot be split evenly.
    """
    shards, model = shards.one_dimensional, config.model
    hidden, wide = model.hidden_size, config.target_hidden_size
    ordered, vocab = config.ordered, model.vocab_size
    if ordered is None:
        check_divides("vocab_size of the assistant", vocab, shards.of("vocab"))
        head = linear_shape(("whole_hidden", "vocab"), (hidden, vocab), dtype)
    else:
        groups = ordered.num_centroids
        head = OrderedHead(
            centroids=linear_shape(("whole_hidden", "routes"), (hidden, groups), dtype),
            embed=array_shape(vocab, hidden, dtype=dtype),
            tokens=array_shape(groups, vocab // groups, dtype=jnp.int32),
            chosen=ordered.chosen,
        )
    return Assistant(
        entry=linear_shape(("features", "whole_hidden"), (2 * wide, hidden), dtype),
        layers=tuple(layer_shape(layer, hidden, dtype, shards) for layer in model.layers),
        norm=vector(hidden, dtype),
        exit=linear_shape(("whole_hidden", "features"), (hidden, wide), dtype),
        lm_head=head,
        config=config,
        layout=shards.layout,
    )
