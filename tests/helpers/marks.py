"""Marks for single cases of a parametrized test."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

slow = functools.partial(pytest.param, marks=pytest.mark.slow)  # a case of a parametrized test

# What loading warns of tensors that read images: for ``filterwarnings``.
LEFT_OUT = "ignore:.*tensors are left out"


def slow_by_name(
    table: Mapping[str, Sequence[tuple[Any, ...]]], fast: Sequence[tuple[Any, ...]] = ()
) -> list[Any]:
    """Cases (name, *values) of a table by name; all but those listed are slow."""
    cases = [(name, *values) for name, rows in table.items() for values in rows]
    return [case if case in fast else slow(*case) for case in cases]


def first_of_each(cases: Sequence[Any], kind: Callable[[Any], Any]) -> list[Any]:
    """Cases of which the first of each ``kind`` is fast; those that follow are slow."""
    kinds, marked = set(), []
    for case in cases:
        marked.append(slow(case) if kind(case) in kinds else case)
        kinds.add(kind(case))
    return marked


def first_is_fast(cases: Sequence[Any], count: int = 1) -> pytest.MarkDecorator:
    """Parametrizes ``case``; all but the first ``count`` are slow."""
    marked = [pytest.param(case) for case in cases[:count]] + [slow(case) for case in cases[count:]]
    return pytest.mark.parametrize("case", marked, ids=str)
