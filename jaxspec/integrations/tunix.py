"""Rollouts of Tunix (google-tunix 0.1.7) by an engine: ``ClusterConfig(rollout_engine=...)``.

    engine = functools.partial(
        JaxspecRollout, options=RolloutOptions("Qwen/Qwen2.5-0.5B", names="tunix.qwen2")
    )

See docs/integrations.md.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxspec.checkpoints.maxtext_config import check_maxtext
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.engine.generation import Generation
from jaxspec.integrations.policy_engine import PolicyEngine, is_offloaded, on_device
from jaxspec.integrations.rollout_options import RolloutOptions
from jaxspec.integrations.seeds import seeds_of_call

try:
    from tunix.generate.tokenizer_adapter import TokenizerAdapter
    from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"jaxspec.integrations.tunix needs Tunix ({error}): pip install 'jaxspec-decoding[tunix]' "
        "and pip install --no-deps google-tunix==0.1.7"
    ) from error

# Fields of RolloutConfig that an engine has options of its own for, as they are by default.
ELSEWHERE = {
    "rollout_mapping_config": (None, "names"),
    "tensor_parallel_size": (-1, "mesh"),
    "data_parallel_size": (-1, "mesh"),
    "expert_parallel_size": (1, "mesh"),
}


class Prompt(NamedTuple):
    """Token ids as Tunix shows a prompt to its trainer, and those that its model sees."""

    ids: list[int]
    seen: list[int]


class JaxspecRollout(BaseRollout):
    """Generates Tunix's rollouts; its weights follow the actor's.

    Tunix calls it with the first four arguments, by name.

    Args:
      rollout_actor: the nnx model that is trained, as Tunix calls models.
      tokenizer: as Tunix takes it.
      mesh: of the role ROLLOUT: its devices generate, unless ``options.mesh`` has others.
      rollout_config: the one for training.
      options: see RolloutOptions.

    Attributes:
      engine: the jaxspec.Engine, with statistics of its rounds.
      last: the generations of the last call.

    Raises ValueError for options that do not fit the actor, and if the logits of engine and actor
    differ at the start.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: Mesh,
        rollout_config: RolloutConfig,
        *,
        options: RolloutOptions,
    ):
        _check(rollout_config)
        check_maxtext(options.names, rollout_actor)
        self._tokenizer = TokenizerAdapter(tokenizer)
        self._actor = rollout_actor if options.shares_model else None
        # The trainer's log-probabilities have this temperature, and 1 where it is 0.
        self._temperature = float(rollout_config.temperature) or 1.0
        state = nnx.state(rollout_actor, nnx.Param)
        dtype = rollout_config.data_type or jax.tree.leaves(state)[0].dtype
        length = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
        self._options = options.for_actor(dtype, list(mesh.devices.flat), length)
        self._policy = PolicyEngine(state, self._options)
        self.engine = self._policy.engine
        self.last: list[Generation] = []
        self._calls = 0
        if options.start_check:
            self._policy.check(functools.partial(_logits, rollout_actor))

    def generate(
        self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        """A completion of each prompt. Equal prompts share their pages.

        Sampling is greedy without ``top_p``, as in Tunix's sampler, and at temperature 0. The pad
        token is never sampled, unless it ends the text: the trainer masks it. Each row of each call
        has a seed of its own, which the seed of ``rollout_config`` or of the options, the number of
        the call and the row determine.

        Returns ``tokens`` without the token that ended them, int32 [N] each;
        ``left_padded_prompt_tokens`` int32 [B, max_prompt_length]; ``logprobs``, if they are asked
        for: float32 [N] each, of log_softmax(logits / temperature), without top-k and top-p, as the
        trainer's are. ``logits`` is empty.

        Raises ValueError for prompts that are too long, a prompt that ends with the pad token, and
        other values that cannot be; RuntimeError for logits that are not finite.
        """
        if kwargs:
            raise ValueError(f"JaxspecRollout.generate has no option {', '.join(kwargs)}")
        self._check_length(rollout_config)
        stops = tuple(rollout_config.eos_tokens or [self.eos_id()])
        read = [self._read(row, text, rollout_config) for row, text in enumerate(prompts)]
        sampling = self._sampling(rollout_config, stops, len(prompts))
        self._calls += 1
        self.last = self._policy.generate([prompt.seen for prompt in read], sampling)
        tokens = [_without_stop(each.token_ids, stops) for each in self.last]
        padded = _left_padded(read, rollout_config.max_prompt_length, self.pad_id())
        logprobs = None
        if rollout_config.return_logprobs:
            logprobs = self._logprobs(padded, tokens, rollout_config)
        return RolloutOutput(
            text=[self._tokenizer.decode(each.tolist()) for each in tokens],
            logits=[],
            tokens=tokens,
            left_padded_prompt_tokens=padded,
            logprobs=logprobs,
        )

    def _check_length(self, config: RolloutConfig) -> None:
        _check(config)
        wanted = config.max_prompt_length + config.max_tokens_to_generate
        most = self.engine.cache.max_length
        if wanted > most:
            raise ValueError(
                f"max_prompt_length and max_tokens_to_generate want {wanted} tokens, the engine "
                f"holds {most}: give max_length={wanted} in the options"
            )

    def _read(self, row: int, text: str, config: RolloutConfig) -> Prompt:
        bos, pad = self._tokenizer.bos_id(), self.pad_id()
        ids = self._tokenizer.encode(str(text))
        ids = self._tokenizer.dedup_bos_ids([*([bos] if bos else []), *ids])
        if len(ids) > config.max_prompt_length:
            raise ValueError(
                f"prompt {row} has {len(ids)} tokens, more than max_prompt_length "
                f"{config.max_prompt_length}: raise it, or leave such prompts out"
            )
        if ids and ids[-1] == pad:
            raise ValueError(
                f"prompt {row} ends with the pad token ({pad}), which Tunix's trainer masks: give "
                "the tokenizer another pad token"
            )
        return Prompt(ids, [token for token in ids if token != pad])

    def _sampling(
        self, config: RolloutConfig, stops: tuple[int, ...], rows: int
    ) -> list[SamplingParams]:
        pad = self.pad_id()
        shared: dict[str, Any] = {
            "max_tokens": config.max_tokens_to_generate,
            "stop_token_ids": stops,
            "bad_token_ids": () if pad in stops else (pad,),
            "logprobs": 0 if config.return_logprobs else None,
        }
        if config.top_p is not None and config.temperature != 0:
            shared["temperature"], shared["top_p"] = float(config.temperature), float(config.top_p)
            shared["top_k"] = max(0, config.top_k or 0)  # Tunix writes -1, too
        seed = self._options.seed if config.seed is None else config.seed
        seeds = seeds_of_call(seed, self._calls, rows)
        return [SamplingParams(seed=each, **shared) for each in seeds]

    def _logprobs(
        self, prompts: np.ndarray, tokens: list[np.ndarray], config: RolloutConfig
    ) -> list[np.ndarray]:
        """Log-probabilities of the last call's tokens: those of the rounds at temperature 1, else
        computed anew, in one pass over the texts."""
        temperature = float(config.temperature) or 1.0
        if temperature == 1:
            kept = zip(tokens, self.last, strict=True)
            found = [(each.logprobs or [])[: len(ids)] for ids, each in kept]
            return [np.array([token.logprob for token in each], np.float32) for each in found]
        shape = len(tokens), config.max_tokens_to_generate
        completions = np.full(shape, self.pad_id(), np.int32)
        for row, ids in zip(completions, tokens, strict=True):
            row[: len(ids)] = ids
        logprobs = self._completions_logprobs(prompts, completions, temperature)
        return [row[: len(ids)] for row, ids in zip(logprobs, tokens, strict=True)]

    def _completions_logprobs(
        self, prompts: np.ndarray, completions: np.ndarray, temperature: float
    ) -> np.ndarray:
        tokens = np.concatenate([prompts, completions], axis=1)
        logprobs = self._policy.logprobs(tokens, tokens != self.pad_id(), temperature)
        return logprobs[:, prompts.shape[1] :]

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """Log-probabilities of completions under the weights of the last call: float32 [B, N].

        They have the temperature of the training config, as the trainer's own have. Where
        ``completion_tokens`` [B, N] have the pad token they are 0.

        Args:
          prompt_tokens: integers [B, P], left padded.
          completion_tokens: integers [B, N], right padded.
        """
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        return jnp.asarray(self._completions_logprobs(prompts, completions, self._temperature))

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """From the next call on, generate with these weights.

        Args:
          params: all parameters of the actor, an nnx.State, or of one with LoRA weights these
            alone. They are copied. With ``shares_model`` those that were offloaded are not read:
            Tunix gives them before a call, and once more after it.
          filter_types: kinds of variables in it, as Tunix says; what it has is seen anyway.

        Raises ValueError for other arrays than those of the actor.
        """
        if self._actor is None or not is_offloaded(params):
            self._policy.use(params)

    def pad_id(self) -> int:
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        return self._tokenizer.eos_id()

    def model(self) -> nnx.Module | None:
        """None: what shares the actor's arrays gets no weights. See RolloutOptions.shares_model."""
        return self._actor


def _check(config: RolloutConfig) -> None:
    """Raise ValueError for fields that something else decides here."""
    for name, (default, instead) in ELSEWHERE.items():
        if getattr(config, name) != default:
            raise ValueError(f"rollout_config.{name}: leave it, and give RolloutOptions.{instead}")


def _logits(actor: nnx.Module, tokens: jax.Array) -> jax.Array:
    """Logits [B, T, V] of tokens [B, T], of an actor that is called as Tunix's models are."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    mask = jnp.broadcast_to(jnp.tri(tokens.shape[1], dtype=bool), (*tokens.shape, tokens.shape[1]))
    graph, state = nnx.split(actor)

    @jax.jit
    def run(state: nnx.State) -> jax.Array:
        call: Any = nnx.merge(graph, state)
        logits, _ = call(tokens, positions=positions, cache=None, attention_mask=mask)
        return logits

    return run(on_device(state))


def _without_stop(ids: Sequence[int], stops: tuple[int, ...]) -> np.ndarray:
    """Tunix wants texts without the token that ended them."""
    kept = ids[:-1] if ids and ids[-1] in stops else ids
    return np.array(kept, np.int32)


def _left_padded(prompts: Sequence[Prompt], width: int, pad: int) -> np.ndarray:
    padded = np.full((len(prompts), width), pad, np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[width - len(prompt.ids) :] = prompt.ids
    return padded
