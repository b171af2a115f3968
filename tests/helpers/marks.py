"""Marks for single cases of a parametrized test."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest

slow = functools.partial(pytest.param, marks=pytest.mark.slow)  # a case of a parametrized test


def first_is_fast(cases: Sequence[Any], count: int = 1) -> pytest.MarkDecorator:
    """Parametrizes ``case``; all but the first ``count`` are slow."""
    marked = [pytest.param(case) for case in cases[:count]] + [slow(case) for case in cases[count:]]
    return pytest.mark.parametrize("case", marked, ids=str)
