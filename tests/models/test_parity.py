"""Our decoder on transformers' checkpoints of every family has transformers' logits in float32."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import decoder, linear
from jaxspec.models import forward_pass as forward
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.json.values import read_json
from jaxspec.training.precision import cast_weights
from pallas_kernels.selection import Implementation, Kernels
from tests.helpers.checkpoints import TINY, hf_logits
from tests.helpers.families import LENGTH, VARIANTS, save_family
from tests.helpers.marks import LEFT_OUT, slow
from tests.helpers.parity import assert_close, load, paged_logits
from tests.helpers.sampling_reference import plain_logits

# Without a cache; and page sizes, with how many tokens are read at a time.
WAYS = (None, (3, 1), (7, LENGTH), (5, 10), (1, 1))
# Without a cache: every kind of heads, biases, ropes and experts that is not among those in pages.
FAST_DENSE = (
    *("llama-mha", "llama-gqa", "llama-mqa", "llama-tied", "llama3-rope", "qwen2-windows"),
    *("mixtral", "qwen3_moe", "falcon_h1", "nemotron_h", "kimi_linear"),
    *("qwen3_next", "step3p7"),  # in pages they take many times as long
)
# Names and orders of tensors that other families do not have.
FAST_ALIASES = ("ernie4_5_moe", "qwen3_vl_moe", "axk1")
# In pages: every kind of norm, rope, scale, cap and mixer, and both ways of naming tensors.
FAST_PAGED = (
    *("qwen3-biases-windows", "gemma2", "phi4-mini", "olmo3", "smollm3-windows", "granite"),
    *("gpt_oss", "glm_moe_dsa-shared", "minimax_m2"),
    *("lfm2", "gemma4-small", "llama4_text", "glm5_next"),
)
FAST = {
    *((name, None) for name in (*FAST_DENSE, *FAST_ALIASES)),
    *((name, (3, 1)) for name in FAST_PAGED),
    *((name, (7, LENGTH)) for name in ("qwen3-biases-windows", "deepseek_v3")),
}
CASES = [(name, way) for name in VARIANTS for way in WAYS]


@pytest.mark.parametrize(
    ("name", "way"), [case if case in FAST else slow(*case) for case in CASES], ids=str
)
@pytest.mark.filterwarnings(LEFT_OUT)
def test_logits_equal_transformers(checkpoint, name: str, way: tuple[int, int] | None):
    directory, tokens, expected = checkpoint(name)
    model = load(directory)
    found = plain_logits(model, tokens) if way is None else paged_logits(model, tokens, *way)
    assert_close(found, expected)


class SplitK(Kernels):
    """Operations that take split-K partial sums, as kernels do, and add them up in XLA."""

    def implementation(self, operation: str) -> Implementation:
        return "reference"


@pytest.mark.slow
def test_split_k_products_give_the_same_logits(checkpoint, monkeypatch: pytest.MonkeyPatch):
    """On a GPU products are split like this for kernels that add up the partial sums."""
    directory, tokens, _ = checkpoint("llama-gqa")
    model = cast_weights(load(directory), jnp.bfloat16)
    kernels = SplitK(frozenset({"add_rms_norm", "rope_kv_write"}))

    def dense_logits(tokens: np.ndarray) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _, _ = decoder.run(
            model, jnp.asarray(tokens), positions, model.no_states(), dense_causal_attend,
            kernels=kernels,
        )  # fmt: skip
        return decoder.logits(model, hidden)

    one = tokens[:1, :1]  # a single row, which is padded

    def all_logits() -> list[jax.Array | np.ndarray]:
        paged = paged_logits(model, tokens, 16, LENGTH, kernels)
        return [dense_logits(tokens), dense_logits(one), paged]

    whole, asked = all_logits(), []
    monkeypatch.setattr(linear, "choose_split_k", lambda *sizes: asked.append(sizes) or 4)
    monkeypatch.setattr(forward, "takes_partials", lambda dtype, width: True)
    monkeypatch.setattr(forward, "heads_take_partials", lambda dtype, width: True)
    in_parts = all_logits()
    assert len(asked) == 3 * 3 * model.config.num_layers  # qkv, o and the MLP's last
    for found, expected in zip(in_parts, whole, strict=True):
        assert jnp.abs(found - expected).max() < 0.03 * jnp.abs(expected).max()


ORIGINAL = 16  # below LENGTH


def test_longrope_on_both_sides_of_the_original_length(tmp_path: Path):
    """Texts up to the original length have the short factors. Longer ones have the long factors at
    all positions, where config.json has these in place of the short ones (docs/models.md)."""
    directory = save_family(tmp_path, "phi4-mini", original_max_position_embeddings=ORIGINAL)
    tokens = np.random.default_rng(1).integers(0, 320, (2, LENGTH))
    expected = [hf_logits(directory, tokens[:, :length]) for length in (ORIGINAL, LENGTH)]

    short = load(directory)
    assert short.config.max_position == ORIGINAL
    assert_close(plain_logits(short, tokens[:, :ORIGINAL]), expected[0])

    raw = read_json(directory / "config.json")
    factors = raw["rope_parameters"]
    factors["short_factor"] = factors["long_factor"]
    (directory / "config.json").write_text(json.dumps(raw))
    long = load(directory)
    assert long.config.max_position == TINY["max_position_embeddings"]
    found = np.asarray(plain_logits(long, tokens))
    assert_close(found, expected[1])
    assert np.abs(found[:, :ORIGINAL] - expected[0]).max() > 0.01  # else the factors say nothing
