"""What jaxspec.integrations.tunix uses of google-tunix 0.1.7, by its published signatures.

A test in tests/integrations compares it with the package, where that is installed.
"""

import abc
import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

PAD, BOS, EOS = 0, 1, 2


@dataclasses.dataclass
class RolloutOutput:
    text: list[str]
    logits: list[Any]
    tokens: list[np.ndarray]
    left_padded_prompt_tokens: np.ndarray
    logprobs: list[np.ndarray] | None


@dataclasses.dataclass
class RolloutConfig:
    """Without the fields of other engines."""

    max_tokens_to_generate: int = 64
    temperature: float = 0.9
    top_p: float | None = 1.0
    top_k: int | None = None
    seed: Any = None
    max_prompt_length: int = 64
    kv_cache_size: int = 1024
    data_type: Any = None
    eos_tokens: list[int] | None = None
    rollout_mapping_config: Any = None
    tensor_parallel_size: int = -1
    data_parallel_size: int = -1
    expert_parallel_size: int = 1
    return_logprobs: bool = False


class BaseRollout(abc.ABC):
    @abc.abstractmethod
    def __init__(self, **kwargs): ...

    @abc.abstractmethod
    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **kwargs): ...

    @abc.abstractmethod
    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any): ...

    @abc.abstractmethod
    def update_params(self, params: Any, filter_types: Any = None): ...

    @abc.abstractmethod
    def pad_id(self): ...

    @abc.abstractmethod
    def eos_id(self): ...

    @abc.abstractmethod
    def model(self): ...


class TokenizerAdapter:
    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def dedup_bos_ids(self, ids: list[int]) -> list[int]:
        start = 0
        while start < len(ids) - 1 and ids[start] == ids[start + 1] == self.bos_id():
            start += 1
        return ids[start:]


def compute_per_token_logps(
    graphdef: Any,
    state: Any,
    prompt_tokens: Any,
    completion_tokens: Any,
    pad_id: int,
    eos_id: int,
    temperature: float = 1.0,
) -> jax.Array:
    """As tunix.rl.common's: pads anywhere are no keys and take no positions."""
    tokens = jnp.concatenate([jnp.asarray(prompt_tokens), jnp.asarray(completion_tokens)], axis=1)
    seen = tokens != pad_id
    positions = jnp.maximum(jnp.cumsum(seen, axis=1) - 1, 0)
    mask = seen[:, None, :] & jnp.tri(tokens.shape[1], dtype=bool)
    model = nnx.merge(graphdef, state)
    logits, _ = model(tokens, positions=positions, cache=None, attention_mask=mask)
    count = np.shape(completion_tokens)[1]
    kept = jax.nn.log_softmax(logits[:, -count - 1 : -1] / (temperature or 1.0))
    return jnp.take_along_axis(kept, tokens[:, -count:, None], axis=2)[..., 0]


class LetterTokenizer:
    """A letter is a token. An underscore is the pad token, as a template may write it."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [PAD if letter == "_" else 3 + ord(letter) % 61 for letter in text]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(97 + token) for token in ids)

    def bos_id(self) -> int:
        return BOS

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return PAD


def stub_modules() -> dict[str, ModuleType]:
    """The modules by their names, for sys.modules."""
    contents: dict[str, tuple[Any, ...]] = {
        "tunix.generate.tokenizer_adapter": (TokenizerAdapter,),
        "tunix.rl.rollout.base_rollout": (BaseRollout, RolloutConfig, RolloutOutput),
    }
    names = {".".join(name.split(".")[:n]) for name in contents for n in range(1, 5)}
    modules = {name: ModuleType(name) for name in sorted(names)}
    for name, objects in contents.items():
        for each in objects:
            setattr(modules[name], each.__name__, each)
    return modules
