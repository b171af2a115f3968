"""Requests that go back to their prompts keep of their old text what the new weights write, too."""

from jaxspec.decoding.functional import EngineParams
from jaxspec.engine.generation import Generation
from jaxspec.engine.old_texts import why_not_verified
from jaxspec.engine.weights.rules import Restart


class Repair(Restart):
    """A restart whose old text is a draft, which is verified in wide passes.

    The noise of a request's seed at a position does not depend on the weights. So after a small
    change the text begins as it did. Requests that cannot have drafts are generated anew: those of
    structured output, and all in a pipeline, in deterministic mode or with another acceptance rule.
    """

    def __init__(self, params: EngineParams):
        self._params = params

    def draft(self, generation: Generation, old_text: tuple[int, ...]) -> tuple[int, ...]:
        return () if why_not_verified(self._params, generation.sampling) else old_text
