"""The tree that is expected to pay, from the sizes of the weights alone."""

import re
from typing import Any

import pytest

import jaxspec
from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
from tests.helpers.random_models import make_params

CHAIN = SpeculationConfig.chain(5)


@pytest.mark.parametrize("drafter", ["ngram", "eagle3", "draft_model"])
def test_the_largest_tree_if_all_is_accepted_and_none_if_nothing_is(drafter: str):
    params = make_params(drafter, CHAIN)
    assert jaxspec.choose_shape(params, 1, acceptance=1.0) == CHAIN.shape
    assert jaxspec.choose_shape(params, 1, acceptance=0.0) == PLAIN


def test_fewer_tokens_are_drafted_for_more_rows_and_for_less_acceptance():
    params = make_params("eagle3", CHAIN)
    for values in (
        [jaxspec.choose_shape(params, rows, acceptance=0.8).num_nodes for rows in (1, 64, 4096)],
        [jaxspec.choose_shape(params, 1, acceptance=chance).num_nodes for chance in (1, 0.5, 0)],
    ):
        assert values == sorted(values, reverse=True) and values[-1] == 1


def test_without_a_drafter_nothing_is_drafted():
    assert jaxspec.choose_shape(make_params("none", CHAIN), 1, acceptance=1.0) == PLAIN


def test_the_built_in_pair_drafts_for_one_row_and_not_for_many_on_a_cpu():
    params = jaxspec.load()
    assert jaxspec.choose_shape(params, 1) in (TreeShape.parse("chain:3"), params.speculation.shape)
    assert jaxspec.choose_shape(params, 16) == PLAIN


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_rows": 0}, "num_rows must be an integer, at least 1, got 0"),
        ({"num_rows": 1, "acceptance": 1.5}, "acceptance must be a chance from 0 to 1, got 1.5"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        jaxspec.choose_shape(make_params("ngram", CHAIN), **arguments)
