"""A draft model whose ids are not the target's."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import DraftModelDrafter, MappedModelDrafter, VocabularyMap
from jaxspec.functional import EngineParams
from tests.helpers.engines import sampled_texts
from tests.helpers.random_models import random_target


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_texts_are_those_of_the_same_model_with_the_targets_ids(acceptance: str):
    """All ids are shuffled, and a quarter of the tokens are not drafted."""
    target, generator = random_target(), np.random.default_rng(0)
    vocab = target.config.vocab_size
    order = generator.permutation(vocab)  # the target's id of each of the model's
    assert target.lm_head is not None
    model = target.replace(
        embed=target.embed[order],
        lm_head=target.lm_head.replace(weight=target.lm_head.weight[..., order]),
    )
    shared = np.sort(generator.permutation(vocab)[: 3 * vocab // 4])
    mapped = MappedModelDrafter(
        model=model,
        vocabulary=VocabularyMap(
            model_ids=jnp.asarray(np.argsort(order), jnp.int32),
            shared=jnp.asarray(shared, jnp.int32),
            token_ids=jnp.asarray(order[shared], jnp.int32),
        ),
    )
    spec = SpeculationConfig.chain(2, acceptance)
    texts = [
        sampled_texts(EngineParams(target=target, drafter=drafter, speculation=spec))
        for drafter in (mapped, DraftModelDrafter(model=target))
    ]
    if acceptance == "match":
        assert texts[0] == texts[1]
