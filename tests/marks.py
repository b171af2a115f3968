"""Marks of single cases."""

import functools

import pytest

slow = functools.partial(pytest.param, marks=pytest.mark.slow)  # a case of a parametrized test
