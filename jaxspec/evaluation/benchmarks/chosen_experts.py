"""How many experts the layers of a model read in a round, counted on the device.

Rounds of the engine are run again in a program of their own, in which each layer with experts also
counts the distinct ones that its tokens chose. What is timed is not changed by it.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxspec.decoding import functional
from jaxspec.decoding.drafters import EagleDrafter
from jaxspec.decoding.functional import EngineParams
from jaxspec.decoding.state import EngineState
from jaxspec.models.attention import PagedAttend
from jaxspec.models.decoder import Decoder
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.layer import Layer
from jaxspec.models.mlps import Experts
from jaxspec.models.mlps.routing import Routes
from jaxspec.models.nodes import map_nodes, nodes_of
from jaxspec.parallel.bytes import local_bytes
from jaxspec.parallel.pytree import pytree, static


@dataclasses.dataclass(frozen=True)
class ChosenExperts:
    """Distinct experts that the tokens of a round chose: means over rounds.

    Attributes:
      target: of each of its layers with experts, in one pass over the nodes of all rows.
      draft: of each pass of the draft head, layer by layer; the first pass reads committed tokens.
    """

    target: tuple[float, ...]
    draft: tuple[float, ...] = ()

    @property
    def of_a_layer(self) -> float:
        """The mean over the target's layers."""
        return float(np.mean(self.target))


def expected_choice(experts: Experts, tokens: float) -> float:
    """Distinct experts that so many tokens choose on average, if each token chooses all experts
    alike often and independently of others. Tokens of one text choose more alike."""
    routing = experts.config.routing
    count = routing.num_experts
    return count * (1 - (1 - routing.top_k / count) ** tokens)


def expected_of_a_layer(target: Decoder, tokens: float) -> float | None:
    """The mean of ``expected_choice`` over layers; None: none has experts."""
    expected = [expected_choice(layer, tokens) for layer in layers_of_experts(target.layers)]
    return float(np.mean(expected)) if expected else None


def unread_bytes(experts: Iterable[Experts], chosen: Iterable[float]) -> int:
    """Bytes of those experts of layers that are not among the ``chosen``, so many in each. The
    layers begin again after the last, if there are more numbers."""
    total, sizes = 0.0, [(layer, local_bytes((layer.gate_up, layer.down))) for layer in experts]
    for (layer, size), number in zip(itertools.cycle(sizes), chosen, strict=False):
        total += (1 - layer.share_read(number)) * size
    return round(total)


def layers_of_experts(layers: tuple[Layer, ...]) -> list[Experts]:
    return nodes_of(layers, Experts)


def can_count(params: EngineParams) -> bool:
    """Whether ``count_rounds`` takes these parameters: a target with experts, on one device."""
    return params.mesh is None and bool(layers_of_experts(params.target.layers))


def count_rounds(
    params: EngineParams, state: EngineState, rounds: int, greedy: bool
) -> tuple[EngineState, Array, Array]:
    """Run so many rounds. Returns the state after them, and counts int32 [rounds, passes * layers]
    of the target and of the draft head (see ``chosen_experts``)."""

    def one_round(state: EngineState, nothing: None) -> tuple[EngineState, tuple[Array, Array]]:
        target, draft = [], []
        counting = _counting(params, target.append, draft.append)
        state, _ = functional.decode(
            counting, state, 1, max_rounds=1, fixed=True, greedy=greedy, checked=False
        )
        return state, (_stacked(target), _stacked(draft))

    state, counts = lax.scan(one_round, state, length=rounds)
    return state, *counts


def chosen_experts(target: Any, draft: Any) -> ChosenExperts:
    """The means of what ``count_rounds`` counted."""
    means = (np.mean(np.asarray(counts), axis=0) for counts in (target, draft))
    return ChosenExperts(*(tuple(map(float, counts)) for counts in means))


@pytree
class _CountingExperts(Experts):
    """Experts that hand the number of distinct ones that were chosen to ``record``, traced."""

    record: Callable[[Array], None] = static()

    def in_one_launch(self, rows: Array, step: ForwardPass) -> None:
        """Choices are counted, so they are made in a launch by themselves."""

    def routes(self, rows: Array, step: ForwardPass) -> Routes:
        routes = super().routes(rows, step)
        attend = step.attend
        assert isinstance(attend, PagedAttend)  # as in all passes of an engine
        real = attend.is_token.reshape(-1)
        experts = jnp.where(real[:, None], routes.experts, self.config.routing.num_experts)
        self.record(count_distinct(experts, self.config.routing.num_experts))
        return routes


def count_distinct(values: Array, most: int) -> Array:
    """How many different integers of 0 .. most - 1 there are among ``values``: int32 []."""
    return jnp.sum(jnp.zeros(most, jnp.int32).at[values.reshape(-1)].set(1, mode="drop"))


def _counting(
    params: EngineParams, of_target: Callable[[Array], None], of_draft: Callable[[Array], None]
) -> EngineParams:
    target, drafter = params.target, params.drafter
    counted = target.replace(layers=_counting_layers(target.layers, of_target))
    if isinstance(drafter, EagleDrafter):
        head = drafter.head
        head = head.replace(layers=_counting_layers(head.layers, of_draft))
        drafter = drafter.replace(head=head)
    return params.replace(target=counted, drafter=drafter)


def _counting_layers(
    layers: tuple[Layer, ...], record: Callable[[Array], None]
) -> tuple[Layer, ...]:
    def counting(experts: Experts) -> Experts:
        fields = {field.name: getattr(experts, field.name) for field in dataclasses.fields(Experts)}
        return _CountingExperts(**fields, record=record)

    return map_nodes(layers, counting, Experts)


def _stacked(counts: list[Array]) -> Array:
    return jnp.stack(counts) if counts else jnp.zeros(0, jnp.int32)
