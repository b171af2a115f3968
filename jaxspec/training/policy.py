"""A policy that learns from its samples, and its weights as engines serve them."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxspec.models.decoder import Decoder
from jaxspec.models.forward import undifferentiable
from jaxspec.models.quantized.kv_cache import with_scales_of, without_kv_scales
from jaxspec.parallel.placement import committed_beside
from jaxspec.training.grpo import group_advantages, grpo_step, kl_per_token, rollout_batch
from jaxspec.training.precision import cast_weights


class Policy:
    """The weights of a target in float32, and Adam's moments.

    Args:
      target: whose weights it begins with; what engines serve has its dtypes.
      length: most tokens of a sample, prompt included; steps are compiled once for it.
      temperature: of the samples, above 0.

    Attributes:
      weights: float32.
      served: the same in the dtypes of ``target``, which engines may hold: no step donates it.

    Raises ValueError for a quantized target, which has no gradient.
    """

    def __init__(
        self, target: Decoder, learning_rate: float, length: int, temperature: float = 1.0
    ):
        if (why := undifferentiable(target)) is not None:
            raise ValueError(why)
        self.served, self._length = target, length
        self._optimizer = optax.adam(learning_rate)
        self.weights = jax.tree.map(jnp.copy, cast_weights(without_kv_scales(target), jnp.float32))
        self._state = committed_beside(self.weights, self._optimizer.init(self.weights))
        self._step = jax.jit(
            functools.partial(grpo_step, self._optimizer, temperature),
            donate_argnames=("target", "state"),
        )
        self._kl = jax.jit(functools.partial(kl_per_token, temperature=temperature))

    def learn(
        self,
        prompts: Sequence[Sequence[int]],
        written: Sequence[Sequence[int]],
        rewards: np.ndarray,
    ) -> float:
        """A step on the samples of a batch; returns how far it moved (see kl_per_token).

        Args:
          prompts, written: token ids of P * G samples, those of a prompt one after the other.
          rewards: [P, G].
        """
        advantages = group_advantages(rewards)
        batch = rollout_batch(prompts, written, advantages, self._length)
        self.weights, self._state, before = self._step(
            target=self.weights, state=self._state, batch=batch
        )
        bare = without_kv_scales(self.served)
        cast = jax.tree.map(lambda x, like: jnp.array(x, like.dtype), self.weights, bare)
        self.served = with_scales_of(self.served, cast)
        return float(self._kl(self.weights, batch, before))
