"""A model of your own as the target: any function from (token, state) to (scores, state).

jaxspec verifies a whole tree of drafted tokens in one pass of the target. Attention layers do that
by a mask. This model has no attention: it is a GRU, a function of our own with a state of our own.
Three things make it a target:

1. a *mixer*, the part of a layer that looks at other tokens. It runs the function over the tokens
   of a pass, each from the state of its parent, which in a tree is not always the token before it.
2. what the layer *keeps* of each row (a running sequence): the state after the last committed
   token, and between a pass over a tree and its commit the state after every node.
3. a `Decoder` with that layer between the embeddings and the LM head.

The weights are random and the text means nothing. It is the text of our own loop, token for token.
This is enough for the pure functions; docs/extending.md says what prefix caches need besides.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jaxspec
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.decoding.trees.tree import unpack_mask
from jaxspec.models.decoder import Decoder
from jaxspec.models.layer import Layer
from jaxspec.models.linear import Computed, Linear
from jaxspec.parallel.pytree import Pytree, array, pytree, static

V, H = 64, 32  # vocabulary, hidden size
LENGTH = 64  # tokens of the text, prompt included
PROMPT = [3, 9, 4, 3, 9]


# The function: a GRU cell. Yours may be anything that JAX can run.


def cell(weights: dict[str, Array], x: Array, h: Array) -> Array:  # [..., H], [..., H] -> [..., H]
    update = jax.nn.sigmoid(x @ weights["wz"] + h @ weights["uz"])
    reset = jax.nn.sigmoid(x @ weights["wr"] + h @ weights["ur"])
    return (1 - update) * h + update * jnp.tanh(x @ weights["wh"] + (reset * h) @ weights["uh"])


# 1. and 2. What jaxspec needs to know of it.


@dataclasses.dataclass(frozen=True)
class GRUConfig:
    """Describes the mixer. A mixer with sizes to choose would have them here."""

    ropes: tuple = ()  # no rotary embeddings

    def check_tree_depth(self, max_depth: int) -> None:
        """Trees of any depth can be verified."""


@pytree
class GRUState(Pytree):
    h: Array = array("batch", "hidden")  # [R, H] after the last committed token of every row
    nodes: Array | None = array("batch", "nodes", "hidden", default=None)  # [B, N, H]

    @property
    def overwritable(self) -> bool:
        """Tokens cannot be read a second time: each read moves the state on."""
        return False

    @classmethod
    def commit(cls, states: Sequence[Any], committed: Any, kernels: Any) -> list["GRUState"]:
        """After a tree was verified: keep the state of the last node on the accepted path."""
        last = jnp.maximum(committed.counts - 1, 0)[:, None]
        node = jnp.take_along_axis(committed.path, last, axis=1)
        return [state.kept(committed.rows, committed.counts, node, state.nodes) for state in states]

    def kept(self, rows: Array, counts: Array, place: Array, after: Array) -> "GRUState":
        """With the entry at place [B, 1] of after [B, T, H], for rows [B] that go on at all."""
        chosen = jnp.take_along_axis(after, place[..., None], axis=1)[:, 0]  # [B, H]
        row = jnp.where(counts > 0, rows, len(self.h))  # out of range: not written
        return self.replace(h=self.h.at[row].set(chosen, mode="drop"), nodes=None)

    def reset(self, rows: Array) -> "GRUState":
        """Rows that get another request begin with zeros."""
        return self.replace(h=self.h.at[rows].set(0, mode="drop"))


@pytree
class GRUMixer(Pytree):
    weights: Any
    config: GRUConfig = static(default=GRUConfig())
    reader = None  # the input comes as an array

    def init_state(self, geometry: Any, layout: Any) -> GRUState:
        return GRUState(h=jnp.zeros((geometry.num_rows, H)))

    def __call__(self, x: Array, state: GRUState, step: Any) -> tuple[Computed, GRUState]:
        """From the tokens of a pass, x [B, T, H]. ``step.attend`` says where they stand."""
        where = step.attend
        batch, size, _ = x.shape
        if where.ancestors is None:  # a part of a prompt: each token follows the one before it
            after = self.run(x, state.h[where.rows], jnp.arange(size) - jnp.ones((batch, 1), int))
            counts = where.kv_lens - where.context_lens  # [B] of the tokens, the rest is padding
            last = jnp.maximum(counts - 1, 0)[:, None]
            state = state.kept(where.rows, counts, last, after)
        else:  # a tree: a node's parent is the last of its ancestors but itself
            ancestors = unpack_mask(where.ancestors, size)  # bool [B, T, T], with the node itself
            above = ancestors & ~jnp.eye(size, dtype=bool)
            parents = jnp.max(jnp.where(above, jnp.arange(size), -1), axis=-1)
            after = self.run(x, state.h[where.rows], parents)
            state = state.replace(nodes=after)  # which of them to keep, commit will know
        return Computed(after - x), state  # a layer adds to its input: this replaces it

    def run(self, x: Array, start: Array, parents: Array) -> Array:
        """The state after each token [B, T, H], from that of its parent [B, T], -1: the start."""

        def one_token(after: Array, place: Array) -> tuple[Array, None]:
            parent = parents[:, place][:, None, None]
            above = jnp.take_along_axis(after, jnp.maximum(parent, 0), axis=1)[:, 0]
            before = jnp.where(parent[:, 0] >= 0, above, start)
            return after.at[:, place].set(cell(self.weights, x[:, place], before)), None

        return jax.lax.scan(one_token, jnp.zeros_like(x), jnp.arange(x.shape[1]))[0]


@pytree
class NoMlp(Pytree):
    reader = None

    def __call__(self, x: Array, step: Any) -> Computed:
        return Computed(jnp.zeros_like(x))


# 3. The model.


def random_model() -> Decoder:
    names = ("wz", "uz", "wr", "ur", "wh", "uh")
    *keys, for_embed, for_head = jax.random.split(jax.random.key(0), len(names) + 2)
    weights = {n: jax.random.normal(k, (H, H)) / H**0.5 for n, k in zip(names, keys, strict=True)}
    # Types of the library's own layers do not know ours, so they are left open: Any.
    parts: Any = GRUMixer(weights=weights), NoMlp(), GRUConfig(), None
    mixer, mlp, description, nothing = parts
    config = ModelConfig(
        vocab_size=V,
        hidden_size=H,
        rms_norm_eps=1e-6,
        max_position=256,
        layers=(LayerConfig(mixer=description, mlp=nothing),),
    )
    return Decoder(
        embed=jax.random.normal(for_embed, (V, H)),
        layers=(Layer(input_norm=None, mixer=mixer, post_norm=None, mlp=mlp),),
        norm=nothing,
        lm_head=Linear(weight=jax.random.normal(for_head, (H, V)) / 2, axes=("hidden", "vocab")),
        config=config,
    )


def own_loop(model: Any) -> list[int]:
    """The function as you would run it without jaxspec: a token at a time, greedily."""
    weights = model.layers[0].mixer.weights
    step = jax.jit(lambda token, h: cell(weights, model.embed[token], h))
    tokens, h = list(PROMPT), jnp.zeros(H)
    for place in range(LENGTH - 1):
        h = step(tokens[place], h)
        if place + 1 == len(tokens):
            tokens.append(int(jnp.argmax(h @ model.lm_head.weight)))
    return tokens


@jax.jit
def read(params: jaxspec.EngineParams) -> Any:
    """The state of an engine with one row, which has read the prompt."""
    state = jaxspec.init_state(params, num_rows=1, max_length=LENGTH)
    state = jaxspec.admit(params, state, [0], jnp.array([PROMPT]), [len(PROMPT)])
    return jaxspec.prefill_all(params, state, width=4, greedy=True)[0]  # in two parts


@functools.partial(jax.jit, static_argnames="shape")
def write(params: jaxspec.EngineParams, state: Any, shape: Any = None) -> tuple[Array, Array]:
    """The text [LENGTH], and the rounds that it took."""
    # Without sampling: a small program, which compiles fast.
    state, emitted = jaxspec.decode(params, state, LENGTH, shape=shape, greedy=True)
    return state.rows.tokens[0], emitted.num_rounds


def main() -> None:
    model = random_model()
    tree = jaxspec.SpeculationConfig(num_nodes=6, max_depth=3, top_k=2)
    # The built-in model with n-gram lookup, and our model in the place of its target.
    params = jaxspec.load(drafter="ngram", speculation=tree).replace(target=model)
    start = read(params)
    text, rounds = write(params, start)
    plain, plain_rounds = write(params, start, jaxspec.PLAIN)
    print("tokens", text.tolist())
    print(f"{rounds} passes with trees of 6 nodes, {plain_rounds} without drafts")
    assert text.tolist() == plain.tolist() == own_loop(model)
    assert rounds < plain_rounds, "no draft was accepted"
    print("The tokens are those of plain decoding, and of a loop without jaxspec.")


if __name__ == "__main__":
    main()
