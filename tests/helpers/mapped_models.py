"""A draft model whose ids are not the target's."""

import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.drafters import MappedModelDrafter, VocabularyMap
from jaxspec.models.decoder import Decoder


def mapped_copy(target: Decoder) -> MappedModelDrafter:
    """The target as its own draft model: all ids are shuffled, and a quarter of the tokens are not
    drafted."""
    generator, vocab = np.random.default_rng(0), target.config.vocab_size
    order = generator.permutation(vocab)  # the target's id of each of the model's
    assert target.lm_head is not None
    model = target.replace(
        embed=target.embed[order],
        lm_head=target.lm_head.replace(weight=target.lm_head.weight[..., order]),
    )
    shared = np.sort(generator.permutation(vocab)[: 3 * vocab // 4])
    return MappedModelDrafter(
        model=model,
        vocabulary=VocabularyMap(
            model_ids=jnp.asarray(np.argsort(order), jnp.int32),
            shared=jnp.asarray(shared, jnp.int32),
            token_ids=jnp.asarray(order[shared], jnp.int32),
        ),
    )
