"""Tiny random models with experts, and what experts compute, written out in float64."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config.experts import (
    BoundedSwiglu,
    ClampedSwiglu,
    ExpertActivation,
    ExpertsConfig,
    LimitedSwiglu,
    RoutingConfig,
)
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.mlps import Experts
from jaxspec.models.mlps.expert_linear import ExpertLinear
from jaxspec.models.mlps.mix import LocalExperts
from jaxspec.models.mlps.routing import Routes
from jaxspec.models.nodes import map_nodes
from pallas_kernels.packed_experts import Code
from tests.helpers.random_models import as_dtype, random_target, tiny_config

EXPERTS = ExpertsConfig(16, RoutingConfig(8, 2, normalize=True))


def expert_config(experts: ExpertsConfig = EXPERTS, **changes: Any) -> ModelConfig:
    """``tiny_config`` with experts in all layers but the first."""
    config = tiny_config(**changes)
    first, *others = config.layers
    return config.map_layers(
        lambda layer: layer if layer is first else LayerConfig(layer.mixer, experts)
    )


def random_expert_target(
    config: ModelConfig | None = None, seed: int = 0, **options: Any
) -> Decoder:
    """As random_target, with experts that keep a row's size."""
    target = random_target(expert_config() if config is None else config, seed, **options)

    def grown(linear: ExpertLinear) -> ExpertLinear:
        experts, inputs = linear.weight.shape[:2]
        return linear.replace(weight=linear.weight * math.sqrt(experts / inputs))

    def changed(experts: Any) -> Any:
        if experts.of_tokens is not None:
            order = np.random.default_rng(seed).random((len(experts.of_tokens), 8)).argsort(axis=1)
            chosen = order[:, : experts.of_tokens.shape[1]]
            experts = experts.replace(of_tokens=jnp.asarray(chosen, jnp.int32))
        return experts.replace(gate_up=grown(experts.gate_up), down=grown(experts.down))

    return target.replace(layers=map_nodes(target.layers, changed, Experts))


def random_own(
    num_experts: int,
    hidden: int,
    units: int,
    activation: ExpertActivation | None,
    seed: int = 0,
) -> LocalExperts:
    """Random experts; with biases if they have an activation of their own."""
    rng, bias = np.random.default_rng(seed), activation is not None

    def linear(inputs: int, *out: int) -> ExpertLinear:
        weight = rng.standard_normal((num_experts, inputs, *out)) / math.sqrt(inputs)
        own = as_dtype(rng.standard_normal((num_experts, *out)), np.float32)
        return ExpertLinear(
            weight=as_dtype(weight, np.float32), bias=own if bias else None, axes=()
        )

    gate_up, down = linear(hidden, 2, units), linear(units, hidden)
    return LocalExperts(gate_up=gate_up, down=down, first=0, activation=activation)


def random_rows(
    num_rows: int, hidden: int, num_experts: int, k: int, seed: int
) -> tuple[Any, Routes]:
    """Rows [N, H], each with k random experts."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((num_rows, num_experts)), axis=1)[:, :k].astype(np.int32)
    weights = rng.random((num_rows, k), np.float32)
    x = rng.standard_normal((num_rows, hidden)).astype(np.float32)
    return x, Routes(*jax.device_put((ids, weights)))


def written_out(own: LocalExperts, x: np.ndarray, routes: Routes) -> np.ndarray:
    """What experts add to rows, choice by choice: float64 [N, H]."""
    result, host = np.zeros(x.shape), jax.device_get(own)
    for row, (ids, weights) in enumerate(zip(*map(np.asarray, routes[:2]), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            gate, up = _product(host.gate_up, expert, x[row].astype(np.float64))
            units = _activated(own.activation, gate, up)
            result[row] += weight * _product(host.down, expert, units)
    return result


def _product(linear: ExpertLinear, expert: int, x: np.ndarray) -> np.ndarray:
    product = np.tensordot(x, np.asarray(linear.weight[expert], np.float64), 1)
    return product if linear.bias is None else product + np.asarray(linear.bias[expert])


def _activated(activation: ExpertActivation | None, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if activation is None:
        return gate / (1 + np.exp(-gate)) * up
    if activation == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return gate * (1 + np.tanh(inner)) / 2 * up
    if isinstance(activation, LimitedSwiglu):
        limit, opened = activation.limit, gate / (1 + np.exp(-gate))
        return np.minimum(opened, limit) * np.clip(up, -limit, limit)
    assert isinstance(activation, ClampedSwiglu | BoundedSwiglu)
    gate, up = np.minimum(gate, activation.limit), np.clip(up, -activation.limit, activation.limit)
    if isinstance(activation, BoundedSwiglu):
        return gate / (1 + np.exp(-gate)) * up
    return (up + 1) * gate / (1 + np.exp(-activation.alpha * gate))


def random_bytes(shape: tuple[int, ...], code: Code, seed: int = 0) -> np.ndarray:
    """Bytes of numbers, none of which is NaN."""
    values = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return values - (values & 127 == 127) if code == "e4m3" else values
