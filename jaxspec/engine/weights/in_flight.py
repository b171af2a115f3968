"""The rules for requests that have begun when an engine's weights change, by their names."""

from collections.abc import Mapping
from typing import Literal

from jaxspec.decoding.functional import EngineParams
from jaxspec.engine.weights.repair import Repair
from jaxspec.engine.weights.rules import Finish, Restart, Rule

type InFlight = Literal["refuse", "finish", "restart", "repair"]


def rule_for(in_flight: InFlight, params: EngineParams, *, is_idle: bool) -> Rule:
    """The rule of this name, for an engine of these parameters.

    Raises ValueError for an unknown name, and RuntimeError for ``refuse`` unless the engine
    ``is_idle``.
    """
    rules: Mapping[str, Rule] = {
        "refuse": Finish(),
        "finish": Finish(),
        "restart": Restart(),
        "repair": Repair(params),
    }
    rule = rules.get(in_flight)
    if rule is None:
        raise ValueError(f"in_flight is {in_flight!r}: use one of {', '.join(rules)}")
    if in_flight == "refuse" and not is_idle:
        raise RuntimeError(
            "requests are under way: let them finish, cancel them, or say with in_flight what "
            "becomes of them"
        )
    return rule
