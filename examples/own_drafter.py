"""A drafter of your own with a memory: for every token, the token that came after it last.

A drafter is a pytree with a few pure methods. What it remembers of each row (a row is a running
sequence) is part of the engine's state, beside the cache, and its methods are compiled into the
engine's programs. Whatever it proposes, the text stays the model's own: a drafter only makes it
come faster. docs/extending.md describes every method.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from tokenizers import Tokenizer

import jaxspec
from jaxspec.decoding.drafters import DraftState, StatelessDrafter
from jaxspec.decoding.trees.tree import DraftTree, make_chain
from jaxspec.parallel.pytree import Pytree, array, pytree

UNKNOWN = -1
LENGTH = 96  # tokens of the text, prompt included


@pytree
class Followers(Pytree):
    after: Array = array("batch", "vocab")  # int32 [R, V]: what followed each token, or UNKNOWN


@pytree
class FollowerDrafter(StatelessDrafter):
    """A bigram model that learns from the text as it is written.

    StatelessDrafter answers all that a drafter is asked. It leaves the memory as it is in the
    methods that are not written here. Types of arguments are left open to keep this short.
    """

    def init_rows(self, num_rows: int, target: Any, capacity: Any) -> Followers:
        """The memory of rows that get a request: nothing is known yet."""
        vocab = target.config.vocab_size
        return Followers(after=jnp.full((num_rows, vocab), UNKNOWN, jnp.int32))

    def prefill(
        self, target: Any, state: Any, chunk: Any, features: Any, options: Any
    ) -> DraftState:
        """Called when a part of the prompts has been read: ``chunk.tokens`` [R, T], of which the
        first ``chunk.counts`` [R] are real."""
        real = jnp.arange(chunk.tokens.shape[1]) < chunk.counts[:, None]
        return DraftState(rows=learned(state.rows.draft, chunk.tokens, real))

    def propose(self, target: Any, state: Any, options: Any) -> tuple[DraftTree, DraftState]:
        """Called in every round: learn what the round before committed, then draft a chain."""
        rows, depth = state.rows, options.speculation.max_depth
        # A round commits at most depth + 1 tokens. The last one, the root, is at context_lens.
        place = rows.context_lens[:, None] + jnp.arange(-depth - 1, 1)  # [R, depth + 2]
        tokens = jnp.take_along_axis(rows.tokens, jnp.maximum(place, 0), axis=1)
        memory = learned(rows.draft, tokens, (place >= 0) & rows.active[:, None])
        chain = [rows.roots]  # int32 [R] each
        for _ in range(depth):
            following = jnp.take_along_axis(memory.after, chain[-1][:, None], axis=1)[:, 0]
            chain.append(jnp.where(chain[-1] == UNKNOWN, UNKNOWN, following))
        chain = jnp.stack(chain, axis=1)
        num_nodes = jnp.sum(chain != UNKNOWN, axis=1)  # what comes after them is padding
        return make_chain(jnp.maximum(chain, 0), num_nodes), DraftState(rows=memory)


def learned(memory: Followers, tokens: Array, real: Array) -> Followers:
    """After reading the real ones of tokens [R, T], which are consecutive.

    If a token comes twice among them, either of its followers may be kept. That may change what
    is drafted. It cannot change what is written.
    """
    row, vocab = jnp.arange(len(tokens))[:, None], memory.after.shape[1]
    first = jnp.where(real[:, :-1] & real[:, 1:], tokens[:, :-1], vocab)  # vocab: not written
    return Followers(after=memory.after.at[row, first].set(tokens[:, 1:], mode="drop"))


@jax.jit
def read(params: Any, prompt: Array) -> Any:
    """The state of an engine with one row, which has read the prompt."""
    state = jaxspec.init_state(params, num_rows=1, max_length=LENGTH)
    state = jaxspec.admit(params, state, [0], prompt[None], [len(prompt)])
    return jaxspec.prefill_all(params, state, width=16, greedy=True)[0]


@functools.partial(jax.jit, static_argnames="shape")
def write(params: Any, state: Any, shape: Any = None) -> tuple[Any, Array]:
    """The state when the text is complete, and the rounds that it took."""
    # Without sampling: a small program, which compiles fast.
    state, emitted = jaxspec.decode(params, state, LENGTH, shape=shape, greedy=True)
    return state, emitted.num_rounds


def main() -> None:
    tokenizer = Tokenizer.from_file(str(jaxspec.BUILT_IN_MODEL / "tokenizer.json"))
    code = 'NAMES = {\n    "a": "a",\n    "b": "b",\n    "c": "c",\n'
    prompt = jnp.array(tokenizer.encode(code).ids)
    chain = jaxspec.SpeculationConfig.chain(4)  # four drafted tokens a round
    params = jaxspec.load(drafter=FollowerDrafter(), speculation=chain)  # the built-in model

    start = read(params, prompt)
    state, rounds = write(params, start)
    plain, plain_rounds = write(params, start, jaxspec.PLAIN)
    text, after = state.rows.tokens[0], state.rows.draft.after[0]
    assert text.tolist() == plain.rows.tokens[0].tolist(), "a drafter never changes the text"
    assert rounds < plain_rounds, "no draft was accepted"
    print(tokenizer.decode(text.tolist()))
    print(f"\n{rounds} rounds; {plain_rounds} without a drafter. The texts are the same.")
    print("It remembers, among others:")
    for token in jnp.argsort(after != UNKNOWN, descending=True)[:5].tolist():
        print("   ", *(repr(tokenizer.decode([each])) for each in (token, int(after[token]))))


if __name__ == "__main__":
    main()
