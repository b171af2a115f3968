"""Actors of MaxText: what their config says, and tied embeddings, which are rounded for logits."""

import dataclasses
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec import from_nnx
from jaxspec.checkpoints.maxtext_config import check_maxtext
from jaxspec.models.decoder import decoder_shapes
from jaxspec.models.from_config.model import load_model_config
from tests.helpers.nnx_llama import ScannedLlama, write_config

NAMES = "maxtext.llama3.1"


class RopeType(StrEnum):
    """MaxText's values are of such a class."""

    DEFAULT = "default"
    LLAMA = "llama3.1"
    YARN = "yarn"


class Transformer(nnx.Module):
    """A model with MaxText's config alone."""

    def __init__(self, rope_type: str, model_name: str = "default", **changes: bool):
        tied = {"logits_via_embedding": False, "normalize_embedding_logits": True}
        values = {"rope_type": rope_type, "model_name": model_name} | tied | changes
        self.config = nnx.static(SimpleNamespace(**values))


class Adapter(nnx.Module):
    def __init__(self, base: nnx.Module):
        self.base = base


FITTING = [
    ("maxtext.llama", RopeType.DEFAULT, "llama3-8b"),
    ("maxtext.llama", "default", "llama2-7b"),
    ("maxtext.llama3.1", RopeType.LLAMA, "default"),
    ("maxtext.llama3.1", RopeType.DEFAULT, "llama3.1-8b"),
    ("maxtext.qwen3", RopeType.DEFAULT, "qwen3-0.6b"),
    ("tunix.llama3", RopeType.YARN, "default"),
]
REFUSED = [
    ("maxtext.llama", RopeType.LLAMA, "default", "give names='maxtext.llama3.1'"),
    ("maxtext.llama", RopeType.DEFAULT, "llama3.1-8b", "give names='maxtext.llama3.1'"),
    ("maxtext.llama3.1", RopeType.DEFAULT, "llama3.3-70b", "give names='maxtext.llama'"),
    ("maxtext.llama3.1", RopeType.DEFAULT, "qwen3-8b", "give names='maxtext.qwen3'"),
    ("maxtext.llama", RopeType.YARN, "default", "rope_type='yarn'.*there is no layout"),
]


@pytest.mark.parametrize(("names", "rope_type", "model_name"), FITTING)
def test_a_layout_that_fits_is_taken(names: str, rope_type: str, model_name: str):
    check_maxtext(names, Adapter(Transformer(rope_type, model_name)))
    check_maxtext({"a": "b"}, Transformer(rope_type, model_name))
    check_maxtext(names, ScannedLlama())  # without a config


@pytest.mark.parametrize(("names", "rope_type", "model_name", "match"), REFUSED)
def test_another_rotary_embedding_is_refused(
    names: str, rope_type: str, model_name: str, match: str
):
    model = Transformer(rope_type, model_name)
    for actor in (model, Adapter(model)):
        with pytest.raises(ValueError, match=match):
            from_nnx(actor, {}, names=names)


def test_logits_that_are_divided_are_refused():
    model = Transformer("default", "qwen3-0.6b", logits_via_embedding=True)
    with pytest.raises(ValueError, match="normalize_embedding_logits=False"):
        check_maxtext("maxtext.qwen3", model)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[nnx.State, Any, Any]:
    """The state of an actor without an LM head, its config, and the config of one with a head."""
    folder: Path = write_config(tmp_path_factory.mktemp("tied"))
    untied = load_model_config(folder)
    actor: Any = ScannedLlama()
    del actor.base["decoder"]["logits_dense"]
    config = dataclasses.replace(untied, tie_word_embeddings=True)
    return nnx.state(actor, nnx.Param), config, untied


def test_the_head_of_tied_embeddings_is_rounded_in_float32(tied: tuple[nnx.State, Any, Any]):
    state, config, untied = tied
    table: Any = state["base"]["token_embedder"]["embedding"][...]
    convert = jax.jit(lambda state: from_nnx(state, config, names=NAMES))
    target = convert(state)
    assert target.config == untied
    np.testing.assert_array_equal(target.embed, table)
    rounded = np.asarray(table.astype(jnp.bfloat16).astype(jnp.float32))
    followed = [from_nnx(state, given, names=NAMES, like=target) for given in (None, config)]
    for each in (target, *followed):
        assert each.lm_head is not None
        np.testing.assert_array_equal(each.lm_head.weight.T, rounded)


def test_in_bfloat16_they_stay_tied(tied: tuple[nnx.State, Any, Any]):
    state, config, _ = tied
    target = from_nnx(state, config, names=NAMES, dtype="bfloat16")
    assert target.config == config and target.lm_head is None


def test_a_head_is_tied_only_where_the_config_says_so(tied: tuple[nnx.State, Any, Any]):
    state, config, untied = tied
    with pytest.raises(ValueError, match=r"should be at base\.decoder\.logits_dense\.kernel"):
        from_nnx(state, untied, names=NAMES)
    whole = nnx.state(ScannedLlama(), nnx.Param)
    with pytest.raises(ValueError, match=r"logits_dense\.kernel is no tensor of the model"):
        from_nnx(whole, config, names=NAMES)
    like = decoder_shapes(config, jnp.dtype(jnp.float32))
    with pytest.raises(ValueError, match="give a target that from_nnx made"):
        from_nnx(state, names=NAMES, like=like)
