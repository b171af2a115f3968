"""EngineConfig: values that cannot work are clear errors."""

from typing import Any

import pytest

from jaxspec.config.engine import EngineConfig
from jaxspec.config.speculation import PLAIN, SpeculationConfig


@pytest.mark.parametrize(
    "field", ["max_rows", "rounds_per_call", "prefill_budget", "max_queue", "max_programs"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_counts_must_be_positive_integers(field: str, value: Any):
    with pytest.raises(ValueError, match=f"^{field} must be an integer, at least 1, got [^\n]*$"):
        EngineConfig(**{field: value})


def test_preemption_must_be_one_of_the_known():
    with pytest.raises(ValueError, match="preemption must be"):
        EngineConfig(preemption="never")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("field", ["prefix_caching", "deterministic", "fixed_rounds", "trees"])
@pytest.mark.parametrize("value", [1, "no"])
def test_switches_are_true_or_false(field: str, value: Any):
    with pytest.raises(ValueError, match=f"^{field} must be True[^\n]* got [^\n]*$"):
        EngineConfig(**{field: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adaptive": 1}, "adaptive must be True, False or None"),
        ({"shapes": (PLAIN,)}, "set adaptive=True"),
        ({"adaptive": True, "shapes": ()}, "shapes must be a tuple of TreeShape, not empty"),
        ({"adaptive": True, "shapes": [PLAIN]}, "shapes must be a tuple of TreeShape"),
        ({"adaptive": True, "shapes": (SpeculationConfig(),)}, "shapes must be a tuple"),
        ({"adaptive": True, "shapes": (PLAIN, PLAIN)}, "shapes must not name a tree twice"),
    ],
)
def test_bad_options_of_adaptive_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=f"^[^\n]*{message}[^\n]*$"):
        EngineConfig(**options)
