"""Bodies of block heads in the spelling of their publishers, against the equations in NumPy."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from jaxspec.cache import Geometry, page_slots
from jaxspec.checkpoints.block import load_block_head, save_block_head
from jaxspec.checkpoints.safetensors_io import save_decoder
from jaxspec.models.attention import PagedAttend
from jaxspec.models.decoder import Decoder
from jaxspec.models.heads import BlockHead
from jaxspec.models.heads.block_context import BlockAttend, Context
from jaxspec.models.json.values import read_json
from tests.helpers.block_checkpoints import published_head
from tests.helpers.block_heads import arrays_equal
from tests.helpers.block_reference import block_outputs
from tests.helpers.checkpoints import changed_copy
from tests.helpers.marks import slow
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import random_target, tiny_config

FLOAT32 = jnp.dtype("float32")
SIZE, DEPTH, ROOT, PAGE = 23, 4, 17, 8
TABLE = jnp.array([[3, 1, 4, 2]])
SLIDING, FULL = "sliding_attention", "full_attention"
MIXED: dict[str, Any] = {
    "layer_types": [SLIDING, FULL],
    "sliding_window": 6,
    "use_sliding_window": True,
}
ALL: dict[str, Any] = MIXED | {"layer_types": [SLIDING] * 2}
# Fields of config.json by what their publishers mean.
SPELLINGS: dict[str, dict[str, Any]] = {
    "z-lab: windows are causal, the other layer is not": MIXED,
    "a flag of all layers": MIXED | {"is_causal": False},
    "all windows, both ways": ALL | {"is_causal": False, "use_sliding_window": None},
    "ModelOpt: one window": {"dflash_config": {"use_swa": True, "swa_window_size": 5}},
    "ModelOpt: one window, causal": {
        "dflash_config": {"use_swa": True, "swa_window_size": 5, "causal": True},
    },
    "JetSpec: causal": {"dflash_config": {"causal_head": True}},
}  # fmt: skip
DEFAULT = "z-lab: windows are causal, the other layer is not"


@functools.cache
def target(embed_scale: float = 1.0) -> Decoder:
    config = tiny_config(vocab_size=257, hidden_size=64)
    made = random_target(config)
    object.__setattr__(made.config, "embed_scale", embed_scale)
    return made


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("target")
    save_decoder(target(), model)
    return published_head(tmp_path_factory.mktemp("head"), model, "dflash")


def outputs(head: BlockHead, captured: np.ndarray, of: Decoder) -> np.ndarray:
    """Normed outputs [DEPTH, H] of a block after tokens whose captured states are [SIZE, C]."""

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def run(head: BlockHead, captured: jax.Array, of: Decoder) -> jax.Array:
        states = head.init_state(Geometry(num_pages=6, page_size=PAGE, num_rows=1)).layers
        slots = page_slots(TABLE, jnp.arange(SIZE)[None], jnp.ones((1, SIZE), bool), PAGE)
        context = Context(
            fused=head.fused(captured[None]), positions=jnp.arange(SIZE)[None], slots=slots
        )
        states = head.write_context(context, states)
        block = head.block(jnp.array([ROOT]), DEPTH)
        positions = SIZE + jnp.arange(block.shape[1])[None]
        paged = PagedAttend(
            rows=jnp.array([0]),
            page_table=TABLE,
            context_lens=jnp.array([SIZE]),
            slots=page_slots(TABLE, positions, jnp.ones(positions.shape, bool), PAGE),
            positions=positions,
            kv_lens=jnp.array([SIZE + block.shape[1]]),
        )
        attend = BlockAttend(paged=paged, causal=head.causal)
        return head.outputs(of, block, positions, states, attend)[0][0]

    return np.asarray(run(head, captured, of))


def check(
    directory: Path, of: Decoder, scale: float = 1.0, mask: np.ndarray | None = None
) -> BlockHead:
    """The head of a directory, whose outputs are those of the equations."""
    head = load_block_head(directory, of.config, FLOAT32)
    width = of.config.hidden_size * len(head.capture)
    captured = np.random.default_rng(3).standard_normal((SIZE, width)).astype(np.float32)
    tensors, config = (
        load_file(directory / "model.safetensors"),
        read_json(directory / "config.json"),
    )
    embed = scale * np.asarray(of.embed, np.float64)
    theirs = block_outputs(tensors, config, embed, captured, ROOT, DEPTH, mask)
    assert np.abs(theirs).max() > 1
    np.testing.assert_allclose(outputs(head, captured, of), theirs, rtol=0, atol=1e-4)
    return head


@pytest.mark.parametrize("name", [DEFAULT, *(slow(one) for one in SPELLINGS if one != DEFAULT)])
def test_layers_see_what_the_config_says(name: str, plain: Path, tmp_path: Path):
    own = read_json(plain / "config.json")["dflash_config"]
    fields = SPELLINGS[name]
    nested = {"dflash_config": own | fields.get("dflash_config", {})}
    directory = changed_copy(plain, tmp_path / "in", fields | nested)
    head = check(directory, target())
    save_block_head(head, tmp_path / "out", target())
    assert arrays_equal(load_block_head(tmp_path / "out", target().config, FLOAT32), head)


@pytest.mark.slow
def test_embeddings_are_scaled_as_the_targets_are(plain: Path):
    check(plain, target(8.0), scale=8.0)


def test_layers_of_mimo(plain: Path, tmp_path: Path):
    """Heads that are rotated in part, scaled values, sinks, and a mask with its own embedding."""
    own, rng = read_json(plain / "config.json")["dflash_config"], np.random.default_rng(7)
    options = {
        "use_swa": True,
        "swa_window_size": 9,
        "attention_value_scale": 0.612,
        "attention_sink_bias": True,
        "num_anchors": 4096,
        "loss_decay_gamma": 7.0,
        "backbone_rotary_base": 5000000,
    }
    sinks: dict[str, Any] = {
        f"layers.{i}.self_attn.attention_sink_bias": rng.standard_normal(4).astype(np.float32)
        for i in range(2)
    }
    fields = {"partial_rotary_factor": 0.5, "rope_theta": 10000, "v_head_dim": 16}
    fields["dflash_config"] = own | options
    directory = changed_copy(plain, tmp_path, fields, **sinks)
    mask = torch.tensor(rng.standard_normal(64)).to(torch.bfloat16)
    torch.save({"mask_token_id": 250, "embedding": mask}, directory / "mask_embedding.pt")
    head = check(directory, target(), mask=mask.to(torch.float64).numpy())
    assert head.mask_embedding is not None
    torch.save(mask[None].float(), directory / "mask_embedding.pt")  # a tensor alone
    again = load_block_head(directory, target().config, FLOAT32)
    np.testing.assert_array_equal(again.mask_embedding, head.mask_embedding)
    for wrong, message in (
        ({"mask_token_id": 7, "embedding": mask}, "is of token 7, and mask_token_id is 250"),
        (mask[:9], "must hold an embedding of 64 numbers, got (9,)"),
        ({"mask_token_id": 250}, "must hold an embedding of 64 numbers, got None"),
        ({"embedding": torch.nn.Linear(2, 2)}, "is not read without torch: an object torch.nn"),
    ):
        torch.save(wrong, directory / "mask_embedding.pt")
        with pytest.raises(ValueError) as caught:
            load_block_head(directory, target().config, FLOAT32)
        assert message in str(caught.value) and "\n" not in str(caught.value)
