"""A draft model with another vocabulary, many of whose tokens the target has, too."""

from jax import Array

from jaxspec.decoding.drafters.draft_model import DraftModelDrafter
from jaxspec.decoding.round_options import RoundOptions
from jaxspec.models import decoder
from jaxspec.parallel.pytree import Pytree, array, pytree


@pytree
class VocabularyMap(Pytree):
    """Which tokens of a target and a draft model spell the same (Timor et al., arXiv 2502.05202).

    Attributes:
      model_ids: the draft model's token for each of the target's: the same if it has that, else one
        that spells its end, after which its next token comes as likely as after the whole.
      shared: the draft model's ids of the tokens that both have; ``token_ids`` are the target's.
    """

    model_ids: Array = array("draft_ids")  # int32 [V]
    shared: Array = array("draft_ids")  # int32 [W]
    token_ids: Array = array("draft_ids")  # int32 [W]


@pytree
class MappedModelDrafter(DraftModelDrafter):
    """Drafts with ``model`` the tokens that it shares with the target."""

    vocabulary: VocabularyMap

    @property
    def token_ids(self) -> Array:
        return self.vocabulary.token_ids

    def model_tokens(self, tokens: Array) -> Array:
        return self.vocabulary.model_ids[tokens]

    def draft_logits(self, hidden: Array, options: RoundOptions) -> Array:
        return decoder.logits(self.model, hidden, options.kernels)[..., self.vocabulary.shared]
