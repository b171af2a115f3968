"""The whole idea of speculative decoding, in plain JAX. Run it: it takes seconds on a CPU.

A model writes one token a pass, and most of a pass goes into reading its weights: scoring five
tokens takes hardly longer than scoring one. So a cheap *drafter* guesses a few tokens, the model
scores all of them in one pass (*verify*), and those that it would have written anyway are kept
(*accept*). The text is the model's in every case. How many passes it takes depends on the guesses.

The model is the small Llama of Python source that comes with jaxspec. To be short, this file keeps
no KV cache and drafts chains. The engine that it is compared with keeps a cache and drafts trees.
"""

import json

import jax
import jax.numpy as jnp
from jax import Array
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import jaxspec

CONFIG = json.loads((jaxspec.BUILT_IN_MODEL / "config.json").read_text())
GROUPS, D = CONFIG["num_key_value_heads"], CONFIG["head_dim"]  # KV heads, width of a head
K = 4  # tokens drafted in a round
S = 64  # places for tokens; attention is causal, so what follows the text is never seen
NEW = 40  # tokens to write
Weights = dict[str, Array]


# 1. A language model: tokens in; out come, at each place, the scores of the token that follows.


def normed(x: Array, weight: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + CONFIG["rms_norm_eps"]) * weight


def rotated(x: Array) -> Array:  # [S, heads, D]
    angles = jnp.arange(S)[:, None, None] / CONFIG["rope_theta"] ** (jnp.arange(0, D, 2) / D)
    (a, b), cos, sin = jnp.split(x, 2, axis=-1), jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def scores(weights: Weights, tokens: Array) -> Array:  # int32 [S] -> float32 [S, V]
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(CONFIG["num_hidden_layers"]):
        of_layer = f"model.layers.{layer}."
        w = {k.removeprefix(of_layer): v for k, v in weights.items() if k.startswith(of_layer)}
        y = normed(x, w["input_layernorm.weight"])
        q, k, v = ((y @ w[f"self_attn.{name}_proj.weight"].T).reshape(S, -1, D) for name in "qkv")
        q, k = rotated(q).reshape(S, GROUPS, -1, D), rotated(k)
        match = jnp.einsum("tgqd,sgd->gqts", q, k) / D**0.5
        attention = jax.nn.softmax(jnp.where(jnp.tri(S, dtype=bool), match, -jnp.inf))
        mixed = jnp.einsum("gqts,sgd->tgqd", attention, v).reshape(S, -1)
        x += mixed @ w["self_attn.o_proj.weight"].T
        y = normed(x, w["post_attention_layernorm.weight"])
        hidden = jax.nn.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
        x += hidden @ w["mlp.down_proj.weight"].T
    return normed(x, weights["model.norm.weight"]) @ weights["model.embed_tokens.weight"].T


@jax.jit
def probabilities(weights: Weights, tokens: Array, temperature: float) -> Array:  # [S] -> [S, V]
    logits = scores(weights, tokens)
    # At temperature 0 the likeliest token is certain, so greedy decoding is no special case.
    certain = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
    return jnp.where(temperature > 0, jax.nn.softmax(logits / temperature), certain)


@jax.jit
def draw(probs: Array, key: Array) -> Array:
    return jax.random.categorical(key, jnp.log(probs))


@jax.jit
def put(tokens: Array, place: int, token: Array) -> Array:
    return tokens.at[place].set(token)


# 2. Plain decoding: a pass for each token.


def decode_plainly(target: Weights, tokens: Array, length: int, temperature: float) -> Array:
    for place in range(length, length + NEW):
        p = probabilities(target, tokens, temperature)
        tokens = put(tokens, place, draw(p[place - 1], jax.random.key(place)))
    return tokens


# 3. Speculative decoding: draft, verify, accept.


@jax.jit
def accept(p: Array, q: Array, drafted: Array, key: Array) -> tuple[Array, Array]:
    """Rejection sampling: the tokens that a round commits [K + 1], and how many of them count.

    The drafter drew token x with probability q(x); the model would with p(x). It is kept with
    probability min(1, p(x) / q(x)). In the place of the first that is refused comes a token drawn
    from max(0, p - q), scaled to sum to 1: from what the drafter proposes too rarely. The scale is
    the probability of a refusal, so that every token comes with the model's probability:

        q(x) min(1, p(x) / q(x)) + max(0, p(x) - q(x)) = p(x)

    If all are kept, the pass has also scored the place after them: one more token, the bonus.
    """
    coin, other = jax.random.split(key)
    place = jnp.arange(len(drafted))
    kept = jax.random.uniform(coin, drafted.shape) * q[place, drafted] < p[place, drafted]
    count = jnp.sum(jnp.cumprod(kept))  # up to the first that is refused
    proposed = jnp.pad(q, ((0, 1), (0, 0)))  # nothing was proposed for the bonus: it is p's
    last = draw(jnp.maximum(p - proposed, 0)[count], other)
    return jnp.append(drafted, 0).at[count].set(last), count + 1


def decode_speculatively(
    target: Weights, drafter: Weights, tokens: Array, length: int, temperature: float
) -> tuple[Array, list[int]]:
    """The text, and how many tokens each pass of the model gave."""
    end, counts, key = length + NEW, [], jax.random.key(0)
    while length < end:
        key, *keys = jax.random.split(key, K + 2)
        q = []
        for i in range(K):  # draft: K passes of the cheap model
            q.append(probabilities(drafter, tokens, temperature)[length - 1 + i])
            tokens = put(tokens, length + i, draw(q[-1], keys[i]))
        # Verify: one pass of the model gives its distribution after every drafted token.
        p = probabilities(target, tokens, temperature)[length - 1 : length + K]
        kept, count = accept(p, jnp.stack(q), tokens[length : length + K], keys[K])
        tokens = tokens.at[length : length + K + 1].set(kept)
        counts.append(int(count))
        length += counts[-1]
    return tokens, counts


@jax.jit
def in_4_bits(weight: Array) -> Array:
    """Our drafter: the model itself, its matrices rounded to integers from -7 to 7 with a scale
    for each row. It guesses well, and saves nothing here: real drafters are small."""
    scale = jnp.max(jnp.abs(weight), axis=-1, keepdims=True) / 7
    return weight if weight.ndim < 2 else jnp.round(weight / scale) * scale


# 4. What it shows.


def main() -> None:
    stored = load_file(jaxspec.BUILT_IN_MODEL / "model.safetensors")
    target = {name: jnp.asarray(array, jnp.float32) for name, array in stored.items()}
    drafter = jax.tree.map(in_4_bits, target)
    tokenizer = Tokenizer.from_file(str(jaxspec.BUILT_IN_MODEL / "tokenizer.json"))
    prompt = tokenizer.encode("import json\n\n\ndef read_config(path):").ids
    tokens, length = jnp.zeros(S, jnp.int32).at[: len(prompt)].set(jnp.array(prompt)), len(prompt)

    plain = decode_plainly(target, tokens, length, 0.0)[length : length + NEW].tolist()
    text, counts = decode_speculatively(target, drafter, tokens, length, 0.0)
    assert text[length : length + NEW].tolist() == plain
    print(tokenizer.decode(prompt + plain))
    print(f"\ngreedy: {NEW} tokens in {len(counts)} passes instead of {NEW}: {counts}")
    _, counts = decode_speculatively(target, drafter, tokens, length, 1.0)
    print(f"temperature 1: {len(counts)} passes: {counts}")

    # A text at temperature 1 is another draw than plain decoding's, from the same distribution.
    p, q = jax.nn.softmax(2 * jax.random.normal(jax.random.key(1), (2, 8)))  # of 8 tokens
    keys = jax.random.split(jax.random.key(2), (20_000, 2))
    drafted = jax.vmap(draw, (None, 0))(q, keys[:, 0])[:, None]  # chains of one token
    pair = jnp.stack([p, p])  # the model's, at the drafted token and after it
    rounds, _ = jax.vmap(accept, (None, None, 0, 0))(pair, q[None], drafted, keys[:, 1])
    share = jnp.mean(jax.nn.one_hot(rounds[:, 0], 8), axis=0)
    print("\nhow often each of 8 tokens comes, in 20,000 rounds:")
    for name, row in (("drafter", q), ("model", p), ("accepted", share)):
        print(f"{name:>10}", *(f"{value:.3f}" for value in row))
    assert jnp.abs(share - p).max() < 0.02 < jnp.abs(q - p).max()

    # The engine runs such rounds as one compiled program. Here it drafts by looking up n-grams.
    greedy = jaxspec.SamplingParams(temperature=0.0, max_tokens=NEW)
    [completion] = jaxspec.LLM(drafter="ngram", max_length=S).generate([prompt], greedy)
    assert completion.token_ids == plain
    print("\njaxspec writes the same tokens")


if __name__ == "__main__":
    main()
