"""How a chat template turns reasoning off is found by trying it."""

from collections.abc import Mapping
from typing import Any

import jinja2
import openai
import pytest

from jaxspec import LLM
from jaxspec.serving.effort_trial import THINKING, reasoning_off
from tests.helpers.served import MODEL, TEMPLATE, ask

OFF: dict[str, Any] = dict.fromkeys(THINKING, False)
REFUSES = "{% if reasoning_effort %}{{ raise_exception('effort') }}{% endif %}"
COPIED = "{{ reasoning_effort or 'medium' }}<think></think>"  # as gpt-oss has it


def found(template: str) -> Mapping[str, Any] | None:
    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def render(variables: Mapping[str, Any]) -> str:
        try:
            made = jinja2.Environment().from_string(template)
            return made.render(raise_exception=refuse, **variables)
        except jinja2.TemplateError as error:
            raise ValueError(str(error)) from error

    return reasoning_off(render)


@pytest.mark.parametrize(
    ("template", "off"),
    [
        ("{% if enable_thinking is false %}<think></think>{% endif %}", OFF),
        ("{% if not thinking %}<think></think>{% endif %}", OFF),
        # An effort that it does not know would be refused, or told to the model.
        ("{% if enable_thinking %}" + REFUSES + "<think>{% endif %}", OFF),
        ("{% if enable_thinking %}<think>{% endif %}" + COPIED, OFF),
        (
            "{% if reasoning_effort == 'none' %}[off]{% endif %}",
            {**OFF, "reasoning_effort": "none"},
        ),
        (
            "{% if reasoning_effort not in ['high', 'no_think'] %}{{ raise_exception('effort') }}"
            "{% endif %}.",
            OFF | {"reasoning_effort": "no_think"},
        ),
        (COPIED, None),
        (COPIED.replace("reasoning_effort", "reasoning_effort | title"), None),
        ("<think>", None),
        (REFUSES, None),
    ],
)
def test_the_way_is_that_which_changes_the_prompt(template: str, off: Mapping[str, Any] | None):
    assert found(template) == off


def test_a_model_that_always_reasons_refuses_it(llm: LLM):
    request: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "ab"}]}
    request |= {"max_completion_tokens": 2, "reasoning_effort": "none"}
    ask(llm, request, chat_template=TEMPLATE)  # nothing is to be turned off
    with pytest.raises(openai.BadRequestError, match="cannot turn reasoning off") as caught:
        ask(llm, request, chat_template=TEMPLATE + COPIED)
    assert caught.value.param == "reasoning_effort"
