"""Numbers as text."""

import pytest

from jaxspec.evaluation.number_format import or_blank, span, with_interval
from jaxspec.parallel.bytes import gigabytes, megabytes


def test_a_value_stands_before_its_interval():
    assert with_interval(1.9449, (1.7861, 2.15)) == "1.94 (1.79 to 2.15)"
    assert with_interval(1.9449, (1.7861, 2.15), unit="x") == "1.94x (1.79 to 2.15)"
    assert with_interval(0.5, (-0.25, 1.0), "+.1f") == "+0.5 (-0.2 to +1.0)"


def test_a_span_has_the_form_of_both_ends():
    assert span((2, 10.004)) == "2.00 to 10.00"
    assert span((-1e-5, 0.0), "+.5f") == "-0.00001 to +0.00000"


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [(None, ".1f", ""), (0.0, ".1f", "0.0"), (1.26e-3, ".1e", "1.3e-03"), (0.421, ".0%", "42%")],
)
def test_what_is_not_known_is_blank(value: float | None, form: str, text: str):
    assert or_blank(value, form) == text


def test_bytes_are_counted_in_powers_of_ten():
    assert megabytes(0) == "0.0 MB" and megabytes(1_234_560_000) == "1,234.6 MB"
    assert gigabytes(5e6) == "0.01 GB" and gigabytes(1_234_560_000_000) == "1,234.56 GB"
