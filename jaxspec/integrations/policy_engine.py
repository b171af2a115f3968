"""An engine that speaks for a policy in training: ids in, ids and log-probabilities out.

It knows no trainer's library. What a trainer gives is an nnx.State, or a part of one.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jaxspec.checkpoints.check_against import check_against
from jaxspec.checkpoints.from_nnx import from_nnx, target_config
from jaxspec.checkpoints.load import load_params
from jaxspec.checkpoints.safetensors_io import placements
from jaxspec.config.cache import CacheConfig
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.decoding.token_logprobs import token_logprobs
from jaxspec.engine.engine import Engine
from jaxspec.engine.generation import Generation
from jaxspec.engine.programs.sizes import Kind
from jaxspec.integrations.rollout_options import RolloutOptions
from jaxspec.llm.request_length import request_length
from jaxspec.models.decoder import Decoder, decoder_shapes
from jaxspec.parallel import Shards, mesh_layout
from jaxspec.parallel.moving import moved

CHECKED_LENGTH = 64  # tokens: rotary angles differ more with the distance


class PolicyEngine:
    """An engine whose weights follow those of an actor.

    Args:
      state: of the actor. Its arrays are copied, so a trainer may donate them; but of one with
        LoRA weights it must keep the others.
      options: with ``dtype``, ``mesh`` and ``max_length``; see RolloutOptions.for_actor.

    Attributes:
      engine: which generates. Its ``version`` is 0 at first, one more each time the weights change.

    Raises ValueError for a state that does not fit the model, and as LLM does.
    """

    def __init__(self, state: nnx.State, options: RolloutOptions):
        self._names, self._lora, self._warms_up = options.names, options.lora, options.warm_up
        # Trainers give LoRA weights without those that they are of, which stay as they are.
        self._base = state if options.lora is not None else None
        self._ready: set[Kind] = set()
        self._config, dtype = options.model_config(), jnp.dtype(options.dtype)
        config, mesh = target_config(self._config, options.names, dtype), options.mesh
        shards = Shards.over(mesh, mesh_layout(mesh))
        self._shapes = decoder_shapes(config, dtype, shards)
        self._places = placements(self._shapes, mesh)
        self._convert = jax.jit(self._converted)
        logprobs = functools.partial(masked_logprobs, mesh=mesh)
        self._masked_logprobs = jax.jit(logprobs, static_argnames="temperature")
        params = load_params(dataclasses.replace(options, target=self._target(state)), config)
        length = request_length(options, params)
        cache = CacheConfig(options.page_size, length, options.num_pages, options.kv_memory)
        self.engine = Engine(params, cache, options.engine)

    def _converted(self, state: nnx.State) -> Decoder:
        """The actor as a target. It is copied, as jit may hand through an array of the actor's."""
        target = from_nnx(
            state, self._config, names=self._names, lora=self._lora, like=self._shapes
        )
        return jax.tree.map(jnp.copy, target)

    def _target(self, state: nnx.State) -> Decoder:
        """The same on the devices of the engine."""
        return jax.tree.map(moved, self._convert(on_device(state)), self._places)

    def use(self, state: nnx.State) -> None:
        """From the next call on, generate with these weights of the actor.

        They are copied on the devices, nothing passes through the host, and nothing is compiled
        after the first time.

        Args:
          state: of the actor; of one with LoRA weights, these alone will do.

        Raises ValueError for other arrays than those of the first state.
        """
        if self._base is not None:
            known = dict(nnx.to_flat_state(self._base)) | dict(nnx.to_flat_state(state))
            state = nnx.from_flat_state(known)
        self.engine.use_target(self._target(state))

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
    ) -> list[Generation]:
        """The finished generations of these requests. Equal prompts share their pages.

        Raises ValueError for requests that could not run, and RuntimeError if one fails.
        """
        engine = self.engine
        engine.check(prompts, sampling)
        self._warm_up(len(prompts), sampling[0])
        engine.finish(generations := engine.add_all(prompts, sampling))
        for row, generation in enumerate(generations):
            if generation.error is not None:
                raise RuntimeError(f"row {row} of the rollouts has failed: {generation.error}")
        return generations

    def logprobs(self, tokens: np.ndarray, seen: np.ndarray, temperature: float) -> np.ndarray:
        """Log-probabilities of tokens under the weights in use: float32 [B, T], see
        masked_logprobs."""
        rows, params = len(tokens), self.engine.params
        missing = ((0, -rows % params.data_parallel), (0, 0))  # rows are split over devices
        tokens, seen = np.pad(tokens, missing), np.pad(seen, missing)
        found = self._masked_logprobs(params.target, tokens, seen, temperature=temperature)
        return np.asarray(found)[:rows]

    def check(self, actor_logits: Callable[[Array], Array]) -> None:
        """Raise ValueError if the logits of the actor are not those of the engine's weights.

        ``actor_logits`` gives those of tokens [B, T]: [B, T, V].
        """
        params, most = self.engine.params, self.engine.cache.max_length
        shape = params.data_parallel, min(most, CHECKED_LENGTH)
        vocab = params.target.config.vocab_size
        tokens = np.random.default_rng(0).integers(vocab, size=shape).astype(np.int32)
        try:
            check_against(actor_logits, params.target, tokens, mesh=params.mesh)
        except ValueError as error:
            raise ValueError(f"{error}; RolloutOptions.rope_theta states a rotary base") from None

    def _warm_up(self, rows: int, sampling: SamplingParams) -> None:
        """Compile what calls of this kind need; rows that are left run in the same programs."""
        kind = Kind.of(sampling)
        if self._warms_up and kind not in self._ready:
            self.engine.warm_up([sampling], rows=[rows])
            self._ready.add(kind)


def is_offloaded(state: nnx.State) -> bool:
    """Whether arrays of the state lie in host memory, as trainers keep models that they offload."""
    leaves = jax.tree.leaves(state)
    return any(leaf.sharding.memory_kind != _memory_of(leaf) for leaf in leaves)


def on_device(state: nnx.State) -> nnx.State:
    """The state in the memory of its devices."""
    places = jax.tree.map(lambda leaf: leaf.sharding.with_memory_kind(_memory_of(leaf)), state)
    return jax.device_put(state, places) if is_offloaded(state) else state


def _memory_of(array: Array) -> str:
    return next(iter(array.sharding.device_set)).default_memory().kind


def masked_logprobs(
    target: Decoder, tokens: Array, seen: Array, *, temperature: float, mesh: Mesh | None = None
) -> Array:
    """Log-probabilities of tokens [B, T] after those before them that are ``seen`` (bool [B, T]),
    of log_softmax(logits / temperature): float32 [B, T], 0 for each row's first and for those that
    are not seen."""
    first = jnp.argsort(~seen, axis=1, stable=True)  # those that are seen, in their order
    packed = jnp.take_along_axis(tokens, first, axis=1)
    lengths = seen.sum(axis=1)
    found = token_logprobs(target, packed, lengths, temperature=temperature, mesh=mesh)
    places = jnp.maximum(jnp.cumsum(seen, axis=1) - 1, 0)
    return jnp.where(seen, jnp.take_along_axis(found, places, axis=1), 0.0)
