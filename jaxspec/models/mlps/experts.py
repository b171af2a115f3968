"""A mixture of experts: each token goes through some of many MLPs.

Where experts are split over devices, each device has some of them, whole. It computes what these
add to all tokens; the sum over the devices is that of a row-parallel product. All devices choose by
the same hidden states, which are results of collectives and so have the same bits everywhere.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.config.experts import ExpertsConfig, SquaredRelu
from jaxspec.config.mlps import DenseConfig
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import Addend, ChosenSum, Linear, Product, linear_shape, takes_none
from jaxspec.models.mlps.dense import Dense, dense_shape
from jaxspec.models.mlps.expert_linear import AnyExpertLinear, PerExpert, expert_linear_shape
from jaxspec.models.mlps.last_expert import LastExpert
from jaxspec.models.mlps.mix import LocalExperts, mix
from jaxspec.models.mlps.routing import Routes, choose_experts, routes_of_tokens
from jaxspec.models.mlps.slots import routed_in_one_launch, routes_by_kernel
from jaxspec.models.shapes import array_shape, vector
from jaxspec.models.tensors import One, Stacked, TensorMap
from jaxspec.parallel import Axes, Layout, Shards, check_divides
from jaxspec.parallel.collectives import (
    all_gather,
    all_reduce,
    all_tokens,
    reduce_scatter,
    shard_offset,
)
from jaxspec.parallel.pytree import Pytree, array, pytree, static
from pallas_kernels.chosen_products import ChosenProducts
from pallas_kernels.selection import Kernels


@pytree
class Experts(Pytree):
    """Weights of one layer's experts.

    Attributes:
      correction: added to the scores by which experts are chosen; always float32.
      of_tokens: the experts of each token id; None: they are chosen.
      shared: the expert that all tokens go through, and ``shared_gate`` its weight. None with a
        ``shared_size``: it is the last one of gate_up and down, or ``last`` (see
        quantized/shared_among.py).
      to_latent, from_latent: between hidden states and what experts read and write, if that is a
        vector of L entries; else L is H.
    """

    router: Linear  # [H, E]
    correction: Array | None = array("routes")  # [E]
    of_tokens: Array | None = array("features", "routes", default=None)  # int32 [V, k]
    gate_up: AnyExpertLinear  # [E, L, 2, F]; without gates [E, L, 1, F]
    down: AnyExpertLinear  # [E, F, L]
    shared: Dense | None = None
    last: LastExpert | None = None
    shared_gate: Linear | None = None  # [H, 1]
    to_latent: Linear | None = None  # [H, L]
    from_latent: Linear | None = None  # [L, H]
    config: ExpertsConfig = static()

    def __call__(self, x: Array, step: ForwardPass) -> Addend:
        """From normed input [B, T, H] to the addend of the residual stream."""
        with jax.named_scope("mlp"):
            whole = self.whole(x, step)
            rows = whole.reshape(-1, whole.shape[-1])
            mixed = self.in_one_launch(rows, step)
            if mixed is None:
                mixed = self.mixed(rows, self.routes(rows, step), step)
            if isinstance(mixed, ChosenProducts):
                if self.shared is None and not step.layout.axes("experts"):
                    return ChosenSum(mixed, x)
                mixed = mixed.total().astype(x.dtype)
        shared = weight = None
        if self.shared is not None:
            shared = self.shared(x, step)
            weight = None if self.shared_gate is None else self._weight_of_shared(x, step)
        axes = step.layout.axes("experts")
        return Mixture(mixed.reshape(whole.shape), axes, shared, weight)

    def whole(self, x: Array, step: ForwardPass) -> Array:
        """Whole hidden states [B, T, H] of all tokens of the devices that experts are split over,
        of x, which may be split."""
        axes = step.layout.axes("experts")
        tokens = tuple(axis for axis in axes if axis in step.layout.tokens)
        return all_gather(all_tokens(x, tokens), step.layout.hidden)

    def mixed(self, rows: Array, routes: Routes, step: ForwardPass) -> Array | ChosenProducts:
        """What this device's experts add to whole rows [N, H]: [N, H], or products of experts that
        are not added up yet."""
        if self.last is not None:
            others = self.replace(last=None).mixed(rows, routes.without_last(), step)
            return self.last.added(rows, routes.weights[:, -1:], others, step)
        local = LocalExperts(
            gate_up=self.gate_up,
            down=self.down,
            first=shard_offset(self.gate_up.num_experts, step.layout.axes("experts")),
            activation=self.config.activation,
        )
        if self.config.weighs_input:
            rows = rows * routes.weights.astype(rows.dtype)
            routes = routes._replace(weights=jnp.ones_like(routes.weights))
        read = rows if self.to_latent is None else self.to_latent(rows, step.kernels)
        mixed = mix(local, read, routes, self.config.routing.num_experts, step)
        if self.from_latent is None:
            return mixed
        if isinstance(mixed, ChosenProducts):
            mixed = mixed.total().astype(rows.dtype)
        return self.from_latent(mixed, step.kernels)  # of this device's part of the sum

    def in_one_launch(self, rows: Array, step: ForwardPass) -> ChosenProducts | None:
        """What the experts add to few rows [N, H], if a kernel chooses them and multiplies."""
        routers, has_shared = (self.router, self.shared_gate), self.shared_is_last
        every = [(self.gate_up, self.down)]
        if self.last is not None:
            every.append((self.last.gate_up, self.last.down))
        return routed_in_one_launch(rows, routers, every, self.config, has_shared, step)

    def routes(self, rows: Array, step: ForwardPass) -> Routes:
        """The chosen experts of rows [N, H], and the shared one if it is the last of them. In
        float32: near-ties are decided before rounding."""
        config, has_shared = self.config.routing, self.shared_is_last
        parts = self.router, self.shared_gate, config, has_shared
        routes = routes_by_kernel(rows, *parts, step)
        if routes is not None:
            return routes
        logits = self.router.float32(rows)
        if self.of_tokens is not None:
            routes = routes_of_tokens(logits, config, self.of_tokens, step.ids_of_rows(len(rows)))
            return self._with_shared(rows, routes)
        routes = choose_experts(logits, config, self.correction, step.top_k)
        return self._with_shared(rows, routes)

    @property
    def shared_is_last(self) -> bool:
        """Whether the last of the experts is the shared one."""
        return self.shared is None and self.config.shared_size > 0

    def share_read(self, chosen: float) -> float:
        """The part of the experts' weights that is read where so many are chosen."""
        shared = int(self.shared_is_last and self.last is None)
        return (chosen + shared) / (self.config.routing.num_experts + shared)

    def _with_shared(self, rows: Array, routes: Routes) -> Routes:
        """The routes of rows [N, H], with those of all to the shared expert if it is the last."""
        if not self.shared_is_last:
            return routes
        shape, last = (len(rows), 1), self.config.routing.num_experts
        weight = jnp.ones(shape)
        if self.shared_gate is not None:
            weight = jax.nn.sigmoid(self.shared_gate.float32(rows))
        experts = jnp.full(shape, last, routes.experts.dtype)
        return Routes(
            jnp.concatenate([routes.experts, experts], axis=1),
            jnp.concatenate([routes.weights, weight], axis=1),
        )

    def _weight_of_shared(self, x: Array, step: ForwardPass) -> Array:
        """[B, T, 1]"""
        assert self.shared_gate is not None
        rows = all_gather(x, step.layout.hidden)
        return jax.nn.sigmoid(self.shared_gate.float32(rows)).astype(x.dtype)

    reader = None  # several projections read the input

    def mapped(self, prefix: str, tensor_map: TensorMap) -> "Experts":
        """The same, with every array replaced by ``tensor_map``'s result."""
        names = self.config.names
        block = f"{prefix}{names.block}."
        modules = [f"{block}experts.{i}." for i in range(self.config.routing.num_experts)]
        kinds = (names.up,) if _without_gate(self.config) else (names.gate, names.up)
        gate_up = tuple(Stacked(tuple(f"{module}{kind}" for kind in kinds)) for module in modules)
        down = tuple(One(f"{module}{names.down}") for module in modules)
        router, shared = f"{block}{names.router}", self.shared
        around_shared = f"{block}{names.shared}." if names.shared else block
        return self.replace(
            router=tensor_map.linear(self.router, One(router)),
            correction=tensor_map.array(f"{router}.e_score_correction_bias", self.correction),
            of_tokens=tensor_map.array(f"{router}.tid2eid", self.of_tokens),
            gate_up=tensor_map.linear(self.gate_up, PerExpert(gate_up)),
            down=tensor_map.linear(self.down, PerExpert(down)),
            shared=shared and shared.mapped_at(around_shared, tensor_map),
            shared_gate=tensor_map.linear(self.shared_gate, One(f"{block}{names.shared_gate}")),
            to_latent=tensor_map.linear(self.to_latent, One(f"{block}fc1_latent_proj")),
            from_latent=tensor_map.linear(self.from_latent, One(f"{block}fc2_latent_proj")),
        )


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The addend of a mixture of experts: see linear.Addend.

    Attributes:
      routed: [B, T, H] what this device's experts add, of all tokens of the devices in ``axes``.
      axes: mesh axes that the experts are split over.
      shared: the shared expert's product, not computed yet.
      weight: [B, T, 1] its weight, or None.
    """

    routed: Array
    axes: Axes
    shared: Product | None
    weight: Array | None

    def partial_sums(
        self, layout: Layout, kernels: Kernels, takes_partials: Callable[[jnp.dtype, int], bool]
    ) -> Array:
        """The sum over experts and devices, as one partial sum: [1, B, T, H]."""
        total, rest = self.routed, None
        if self.shared is not None and self._are_added(layout):
            total = total + self._weighted(self.shared.local_sums(kernels, takes_none)[0])
        elif self.shared is not None:
            rest = self._weighted(self.shared.result(layout, kernels))
        with jax.named_scope("mlp"):
            total = reduce_scatter(total, layout.hidden, total.ndim - 1)
            over = tuple(axis for axis in self.axes if axis in layout.tokens)
            total = reduce_scatter(total, over, 1)
            done = (*layout.hidden, *over)
            total = all_reduce(total, tuple(axis for axis in self.axes if axis not in done))
            return (total if rest is None else total + rest)[None]

    def _are_added(self, layout: Layout) -> bool:
        """Whether the shared expert's product is summed over the same devices, all together."""
        assert self.shared is not None
        linear = self.shared.linear
        alike = layout.splits(linear.axes)[0] == self.axes and linear.bias is None
        return alike and not layout.hidden and not layout.tokens

    def _weighted(self, shared: Array) -> Array:
        return shared if self.weight is None else shared * self.weight


def experts_shape(
    config: ExpertsConfig, hidden_size: int, dtype: jnp.dtype, shards: Shards
) -> Experts:
    """An Experts of ShapeDtypeStructs.

    Raises ValueError for a number of experts, or a shared width, that cannot be split evenly.
    """
    routing, width = config.routing, config.intermediate_size
    count = routing.num_experts
    check_divides("num_experts", count, shards.of("experts"))
    shared = gate = to_latent = from_latent = None
    if config.shared_size:
        activation, fused = config.shared_activation or "silu", config.shared_fused
        dense = DenseConfig(config.shared_size, activation=activation, fused=fused)
        shared = dense_shape(dense, hidden_size, dtype, shards)
    if config.shared_gate:
        gate = linear_shape(("whole_hidden", "routes"), (hidden_size, 1), dtype)
    inputs = config.latent or hidden_size
    if config.latent is not None:
        to_latent = linear_shape(("whole_hidden", "features"), (hidden_size, inputs), dtype)
        from_latent = linear_shape(("features", "whole_hidden"), (inputs, hidden_size), dtype)
    return Experts(
        router=linear_shape(
            ("whole_hidden", "routes"), (hidden_size, count), dtype, bias=routing.bias
        ),
        correction=vector(count, jnp.float32, when=bool(routing.correction)),
        of_tokens=array_shape(routing.token_ids, routing.top_k, dtype=jnp.int32)
        if routing.token_ids
        else None,
        gate_up=expert_linear_shape(
            ("experts", "whole_hidden", "two", "units"),
            (count, inputs, 1 if _without_gate(config) else 2, width),
            dtype,
            bias=config.bias,
        ),
        down=expert_linear_shape(
            ("experts", "units", "whole_hidden"),
            (count, width, inputs),
            dtype,
            bias=config.bias,
        ),
        shared=shared,
        shared_gate=gate,
        to_latent=to_latent,
        from_latent=from_latent,
        config=config,
    )


def _without_gate(config: ExpertsConfig) -> bool:
    return isinstance(config.activation, SquaredRelu)
