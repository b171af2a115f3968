"""Drafters whose chains have the length that is asked for."""

from jaxspec.decoding.drafters.base import Drafter
from jaxspec.decoding.drafters.eagle import EagleDrafter
from jaxspec.decoding.drafters.mixed import MixedDrafter


def with_whole_chains(drafter: Drafter) -> Drafter:
    """The drafter without early ends: what its rounds cost does not depend on the text."""
    if isinstance(drafter, MixedDrafter):
        return drafter.replace(model=with_whole_chains(drafter.model))
    if isinstance(drafter, EagleDrafter):
        return drafter.replace(least_probability=0.0)
    return drafter
