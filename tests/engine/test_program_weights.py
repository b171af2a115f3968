"""The copy of tied embeddings that an engine's programs read on a CPU: where it is, who sees it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec import SamplingParams
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.engine.engine import Engine
from jaxspec.engine.programs import weights as program_weights
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder
from jaxspec.parallel import make_mesh
from tests.helpers.random_models import make_params, random_target, tiny_config
from tests.helpers.sampling_reference import plain_logits

CHAIN = SpeculationConfig.chain(2)


def own_params(target: Decoder | None = None) -> EngineParams:
    return make_params("ngram", CHAIN, tied_target() if target is None else target)


def tied_target() -> Decoder:
    target, config = random_target(), tiny_config(tie_word_embeddings=True)
    # Smaller embeddings: a token else only repeats itself.
    return target.replace(config=config, embed=0.1 * target.embed, lm_head=None)


def new_engine(params: EngineParams) -> Engine:
    cache = CacheConfig(page_size=8, max_length=64)
    return Engine(params, cache, EngineConfig(max_rows=2, rounds_per_call=4))


def test_programs_read_tied_embeddings_transposed():
    target = tied_target()
    own = program_weights.program_weights(own_params(target)).target
    assert target.lm_head is None and own.lm_head is not None
    np.testing.assert_array_equal(own.lm_head.weight, target.embed.T)
    assert own.embed is target.embed


def test_logits_are_those_of_the_embeddings():
    target = tied_target()
    own = program_weights.program_weights(own_params(target)).target
    tokens = np.arange(20, dtype=np.int32).reshape(2, 10)
    wanted = plain_logits(target, tokens)
    np.testing.assert_allclose(plain_logits(own, tokens), wanted, rtol=0, atol=1e-5)


def test_it_is_made_once():
    own = program_weights.program_weights(own_params())
    assert program_weights.program_weights(own) is own


def test_other_models_get_no_copy(monkeypatch):
    tied, untied = tied_target(), random_target()
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tied)
    repeated = jax.device_put(own_params(tied), NamedSharding(make_mesh(2), PartitionSpec()))
    for params in (
        repeated,
        own_params(untied),
        own_params(rounded),
        own_params().replace(mesh=make_mesh(2)),
    ):
        assert program_weights.program_weights(params) is params
        assert program_weights.as_loaded(params) is params
    monkeypatch.setattr(program_weights, "LARGEST_COPY", tied.embed.nbytes - 1)
    params = own_params(tied)
    assert program_weights.program_weights(params) is params
    monkeypatch.setattr(program_weights, "LARGEST_COPY", tied.embed.nbytes)
    assert program_weights.program_weights(params) is not params


def test_the_engine_shows_the_weights_that_it_was_given():
    params = own_params()
    engine = new_engine(params)
    assert engine.programs.params.target.lm_head is not None
    assert engine.params.target.lm_head is None
    assert jax.tree.structure(engine.params) == jax.tree.structure(params)
    for shown, given in zip(jax.tree.leaves(engine.params), jax.tree.leaves(params), strict=True):
        assert shown.unsafe_buffer_pointer() == given.unsafe_buffer_pointer()


@pytest.mark.parametrize("kind", ["target", "drafter"])
def test_other_weights_get_a_copy_of_their_own(kind: str):
    engine = new_engine(own_params())
    if kind == "target":
        engine.use_target(engine.params.target.replace(embed=engine.params.target.embed * 2))
    else:
        engine.use_drafter(engine.params.drafter)
    used: Any = engine.programs.params.target
    np.testing.assert_array_equal(used.lm_head.weight, engine.params.target.embed.T)
    assert engine.params.target.lm_head is None


def test_after_an_error_the_copy_is_still_there():
    engine = new_engine(own_params())
    copy = engine.programs.params.target.lm_head
    engine.programs.reset()
    assert engine.programs.params.target.lm_head is copy is not None


@pytest.mark.slow
@pytest.mark.parametrize("speculative", ["ngram", "eagle3"])
def test_texts_are_those_of_plain_decoding(speculative: str):
    """By default the copy is compared with the embeddings above, and the logits of both below."""
    sampled = SamplingParams(max_tokens=24, temperature=1.0, seed=3)
    texts: list[list[list[int]]] = []
    for drafter in ("none", speculative):
        engine = new_engine(make_params(drafter, CHAIN).replace(target=tied_target()))
        assert engine.programs.params.target.lm_head is not None
        requests = [
            engine.add([1, 2, 3], sampling) for sampling in (SamplingParams(max_tokens=24), sampled)
        ]
        engine.finish(requests)
        texts.append([one.token_ids for one in requests])
    assert texts[0] == texts[1] and list(map(len, texts[0])) == [24, 24]
