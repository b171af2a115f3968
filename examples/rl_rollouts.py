"""Reinforcement learning with speculative rollouts: GRPO in one file.

The built-in model of Python source learns to write code that compiles. In every step it writes
several samples of each prompt, a program rewards them, and the policy moves towards what was better
than the others of its prompt (GRPO, arXiv:2402.03300, with one update a batch: the ratio of new and
old policy is 1, so nothing is clipped; without a KL term).

Two engines write the samples of each step, one plainly and one speculatively, with the same seeds.
In float32 their samples are the same, token for token, so the policy learns the same from either;
the file asserts it. Both engines read the trainer's arrays: new weights are handed over, not
copied, and compile nothing.

On a CPU speculation loses time here: with so many samples at once a drafted token costs nearly as
much to verify as to write. So by default an engine decodes them plainly there. This one has a tree
given, to show that the samples stay the same. Figures of a GPU are in docs/results/rl.md.

    python3 examples/rl_rollouts.py
"""

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxspec
from jaxspec import LLM, Completion, SamplingParams, SpeculationConfig

PROMPTS = (
    "def read_config(path):\n",
    "def mean(values):\n",
    "class Stack:\n",
    "def is_prime(n):\n",
    "import os\n\ndef find_files(folder, suffix):\n",
    "def merge(left, right):\n",
)


class Batch(NamedTuple):
    """B samples of S tokens at most: prompts, then what the policy wrote."""

    tokens: jax.Array  # int32 [B, S], padded on the right
    lengths: jax.Array  # int32 [B]
    written: jax.Array  # bool [B, S], what the policy wrote
    advantages: jax.Array  # float32 [B]


def reward(text: str) -> float:
    """1 for Python that compiles, up to the last whole line; else 0."""
    *lines, _ = text.split("\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the model writes warns now and then
        try:
            compile("\n".join([*lines, ""]), "sample", "exec")
        except (SyntaxError, ValueError):
            return 0.0
    return 1.0


def advantages_of(rewards: np.ndarray) -> np.ndarray:
    """How much better each sample is than the others of its prompt: float32 [B, G] of [B, G]."""
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return (centred / (rewards.std(axis=1, keepdims=True) + 1e-4)).astype(np.float32)


def as_batch(samples: Sequence[Completion], advantages: np.ndarray, width: int) -> Batch:
    """Samples as arrays of one width, so that the training step is compiled once."""
    tokens = np.zeros((len(samples), width), np.int32)
    lengths, written = np.zeros(len(samples), np.int32), np.zeros(tokens.shape, bool)
    for row, sample in enumerate(samples):
        ids = [*sample.prompt_token_ids, *sample.token_ids]
        tokens[row, : len(ids)], lengths[row] = ids, len(ids)
        written[row, len(sample.prompt_token_ids) : len(ids)] = True
    return Batch(*map(jnp.asarray, (tokens, lengths, written, advantages.reshape(-1))))


def loss_of(target: Any, batch: Batch) -> jax.Array:
    """The policy gradient's loss: a mean over all tokens that were written."""
    logprobs = jaxspec.token_logprobs(target, batch.tokens, batch.lengths, remat=True)
    gain = jnp.where(batch.written, logprobs * batch.advantages[:, None], 0.0)
    return -gain.sum() / batch.written.sum()


@partial(jax.jit, static_argnames="optimizer")
def learn(
    optimizer: optax.GradientTransformation, target: Any, state: Any, batch: Batch
) -> tuple[Any, Any]:
    """The policy and the optimizer's state after a step."""
    updates, state = optimizer.update(jax.grad(loss_of)(target, batch), state, target)
    return optax.apply_updates(target, updates), state


class Trainer:
    """A policy that two engines sample from."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        chain = SpeculationConfig.chain(3)
        self.engines = {"plain": LLM(drafter="none"), "speculative": LLM(speculation=chain)}
        self.policy: Any = self.engines["plain"].params.target
        self.optimizer = optax.adam(args.learning_rate)
        # Placed for good: else the second step, of what the first gives, would compile again.
        self.optimizer_state = jax.device_put(self.optimizer.init(self.policy), jax.devices()[0])
        self.seconds = dict.fromkeys(self.engines, 0.0)
        self.tokens, self.rounds = 0, 0  # of the speculative samples

    def sample(self, step: int) -> list[Completion]:
        """Samples of the policy, from both engines in turn: args.samples of each prompt."""
        count = self.args.samples
        ids = np.arange(len(PROMPTS), dtype=np.uint32)
        seeds = jaxspec.group_seeds(0, ids, count, epoch=step)  # others in every step
        sampling = [
            SamplingParams(temperature=1.0, seed=int(seed), max_tokens=self.args.tokens)
            for seed in np.asarray(seeds).reshape(-1)
        ]
        prompts = [prompt for prompt in PROMPTS for _ in range(count)]
        results = {}
        names = list(self.engines) if step % 2 else list(reversed(self.engines))
        for name in names:
            started = time.perf_counter()
            results[name] = self.engines[name].generate(prompts, sampling)
            if step > 0:  # the first step compiles
                self.seconds[name] += time.perf_counter() - started
        for plain, speculative in zip(results["plain"], results["speculative"], strict=True):
            assert plain.token_ids == speculative.token_ids
            self.tokens += len(speculative.token_ids)
            self.rounds += speculative.num_rounds
        return results["speculative"]

    def step(self, step: int) -> float:
        """Sample, reward and learn; returns the mean reward."""
        samples = self.sample(step)
        prompts = np.repeat(PROMPTS, self.args.samples)
        rewards = np.array([reward(p + s.text) for p, s in zip(prompts, samples, strict=True)])
        rewards = rewards.reshape(len(PROMPTS), self.args.samples)
        width = max(len(sample.prompt_token_ids) for sample in samples) + self.args.tokens
        batch = as_batch(samples, advantages_of(rewards), width)
        self.policy, self.optimizer_state = learn(
            self.optimizer, self.policy, self.optimizer_state, batch
        )
        for llm in self.engines.values():
            llm.use_target(self.policy, version=step + 1)
        return rewards.mean()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=48, help="new ones of a sample")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    trainer = Trainer(parser.parse_args(argv))
    for step in range(trainer.args.steps):
        print(f"step {step}: {trainer.step(step):.2f} of the samples compile", flush=True)
    plain, speculative = trainer.seconds["plain"], trainer.seconds["speculative"]
    print(
        f"The same samples took {plain:.1f} s plainly and {speculative:.1f} s speculatively, "
        f"at {trainer.tokens / trainer.rounds:.2f} tokens a round (seconds of all steps but the "
        "first, which compiles)."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
