"""What the rounds of a call emit, while they run and after."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.decoding.drafters.base import heard_by
from jaxspec.decoding.functional.params import EngineParams
from jaxspec.decoding.round import RoundOutput
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.decoding.sampling import Logprobs
from jaxspec.decoding.state import Emitted, EngineState, PromptLogprobs, RoundTrees
from jaxspec.parallel import partition_specs


class Record(NamedTuple):
    """What the rounds so far emitted. The integers share one array, written in one launch."""

    integers: Array  # int32 [C, R, A + 3]: tokens, count, accepted, drafted
    logprobs: Logprobs | None  # [C, R, A] each
    hidden: Array | None  # [C, R, A, n * H]
    trees: RoundTrees | None
    confidence: Array | None  # [C, R, A - 1]
    policy_logprobs: Array | None  # [C, R, A]

    def with_round(self, index: Array, output: RoundOutput) -> "Record":
        columns = [x[:, None] for x in (output.counts, output.accepted, output.drafted)]
        integers = jnp.concatenate([output.tokens, *columns], axis=1)
        new = Record(
            integers,
            output.logprobs,
            output.hidden,
            output.trees,
            output.confidence,
            output.policy_logprobs,
        )
        return jax.tree.map(lambda old, x: old.at[index].set(x), self, new)

    @property
    def rounds(self) -> RoundOutput:
        *_, counts, accepted, drafted = jnp.moveaxis(self.integers, -1, 0)
        tokens = self.integers[..., :-3]
        return RoundOutput(tokens, counts, accepted, drafted, *self[1:])


def emitted_specs(params: EngineParams, options: RoundOptions, state: EngineState) -> Emitted:
    """Partition specs of a call's Emitted."""

    def none_yet() -> Emitted:
        rounds = empty_record(params, options, state).rounds
        return emitted_rounds(jnp.int32(0), state, rounds)

    emitted = jax.eval_shape(none_yet)
    if options.prompt_logprobs:
        array = emitted.num_rounds
        top = array if options.top_logprobs else None
        prompt = PromptLogprobs(valid=array, logprobs=array, top_tokens=top, top_logprobs=top)
        emitted = emitted.replace(prompt=prompt)
    return partition_specs(emitted, params.layout)


def emitted_rounds(num_rounds: Array, state: EngineState, rounds: RoundOutput) -> Emitted:
    """What a call emits. ``rounds``: arrays [C, R, ...] of its rounds; ``state``: after them."""
    logprobs, top_tokens, top_logprobs = rounds.logprobs or (None, None, None)
    return Emitted(
        num_rounds=num_rounds,
        tokens=rounds.tokens,
        counts=rounds.counts,
        accepted=rounds.accepted,
        drafted=rounds.drafted,
        status=state.rows.status,
        ending=state.rows.ending,
        logprobs=logprobs,
        hidden=rounds.hidden,
        top_tokens=top_tokens,
        top_logprobs=top_logprobs,
        trees=rounds.trees,
        confidence=rounds.confidence,
        policy_logprobs=rounds.policy_logprobs,
        heard=heard_by(state.rows.draft),
    )


def empty_record(params: EngineParams, options: RoundOptions, state: EngineState) -> Record:
    """A record of no round yet."""
    width = options.speculation.max_depth + 1
    size = (options.max_rounds, state.rows.status.shape[0], width)
    hidden_size = len(options.hidden) * params.target.config.hidden_size
    return Record(
        integers=jnp.zeros((*size[:2], width + 3), jnp.int32),
        logprobs=_empty_logprobs(size, options.top_logprobs) if options.logprobs else None,
        hidden=jnp.zeros((*size, hidden_size), params.target.dtype) if options.hidden else None,
        trees=_empty_trees(size, options.speculation.num_nodes) if options.trees else None,
        confidence=jnp.zeros((*size[:2], width - 1), jnp.float32) if options.confidence else None,
        policy_logprobs=jnp.zeros(size, jnp.float32) if options.policy_logprobs else None,
    )


def _empty_trees(size: tuple[int, ...], num_nodes: int) -> RoundTrees:
    nodes = jnp.zeros((*size[:2], num_nodes), jnp.int32)
    path, number = jnp.zeros(size, jnp.int32), jnp.zeros(size[:2], jnp.int32)
    logprobs = nodes.astype(jnp.float32)
    return RoundTrees(tokens=nodes, parents=nodes, num_nodes=number, path=path, logprobs=logprobs)


def _empty_logprobs(size: tuple[int, ...], alternatives: int) -> Logprobs:
    given, wide = jnp.zeros(size, jnp.float32), (*size, alternatives)
    if not alternatives:
        return Logprobs(given, None, None)
    return Logprobs(given, jnp.zeros(wide, jnp.int32), jnp.zeros(wide, jnp.float32))
