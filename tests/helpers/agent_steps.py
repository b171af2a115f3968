"""What a model says in ten steps of an agent whose tools fail, and what the tools say."""

import json
from typing import Any

from tests.helpers.spoken import Script, called, thought

LIMIT = 12  # tokens of an answer: those that are not cut need fewer
PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}}}


def call(name: str, city: str) -> str:
    return called(name, json.dumps({"city": city}, ensure_ascii=False))


WEATHER, BREAKS = call("weather", "Zürich"), call("breaks", "Oslo")
CUT = called("weather", '{"city": "東')[: -len("}\n</tool_call>")]
# What the model says, step by step.
STEPS = (
    WEATHER,  # a call by itself
    f"{thought('that broke?')}{BREAKS}",  # a tool that raises, after reasoning
    f"Let me ask.\n{call('says_no', 'Rome')}",  # a tool that answers with an error, after text
    f"{call('weather', 'Rome')}\n{call('nothing', '東京')}",  # two at once; one has nothing to say
    f"{thought('both')}Both:\n{call('breaks', 'A')}\n{call('weather', 'B')}",
    call("nothing", "no one's"),
    called("weather", '{"city": "\\"quoted\\" \\\\ \\n 🙂"}'),
    f"{thought('again ' * 30)}{call('says_no', 'x' * 200)}",
    WEATHER,  # the same call as before has an id of its own
    f"{thought('done')}Sunny – ☀️ in Zürich.",
)


def weather(city: str) -> str:
    return f"{city}: ☀️ 12 °C"


def breaks(city: str) -> str:
    raise RuntimeError(f"no such place: {city}")


def says_no(city: str) -> str:
    return json.dumps({"error": {"code": 404, "message": f"{city}?"}})


def nothing(city: str) -> str:
    return ""


TOOLS = {tool.__name__: tool for tool in (weather, breaks, says_no, nothing)}


def result_of(name: str, arguments: Any) -> tuple[str, bool]:
    """What a tool says, and whether that is an error. ``arguments``: an object, or its JSON."""
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        return TOOLS[name](**given), False
    except KeyError:
        return f"there is no tool {name}", True
    except ValueError:  # of the arguments
        return "the arguments are no JSON", True
    except (RuntimeError, TypeError) as error:
        return str(error), True


def check_history(script: Script, broken: str = "no such place: Oslo") -> None:
    """The last prompt has all that was said, as it was said.

    ``broken``: how the client tells that a tool has raised.
    """
    assert not script.left
    *_, last = script.prompts
    place = 0
    for text in STEPS[:-1]:
        assert text in last[place:], f"{text!r} is not in {last[place:]!r}"
        place = last.index(text, place) + len(text)
    for result in ("Zürich: ☀️ 12 °C", broken, '"message": "Rome?"', "B: ☀️ 12 °C"):
        assert result in last
    assert last.count("<tool></tool>") == 2  # of the one that has nothing to say
