"""The formats in which models write calls of tools."""

import dataclasses
from types import MappingProxyType


@dataclasses.dataclass(frozen=True)
class Parameters:
    """How a call's arguments are written where they are not a JSON object: each by itself, as
    ``before NAME between VALUE after``. Values are JSON.

    Attributes:
      separator: between two of them.
      kinds: what follows ``between`` where a value is raw text, and where it is JSON.
      raw: whether strings are raw text: without quotes and escapes, up to ``after``.
      python: whether values may be as Python writes them: True, False, None and texts in single
        quotes.
    """

    before: str
    between: str
    after: str
    separator: str = ""
    kinds: tuple[str, str] = ("", "")
    raw: bool = True
    python: bool = False


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls: ``section[0] begin NAME middle ARGUMENTS end section[1]``.

    Attributes:
      begin, middle, end: of one call. Without a middle, the name ends where an argument or the end
        of the call begins.
      trigger: what begins calls in the midst of text, the first part of section and begin; empty:
        calls are the whole text.
      section: around all calls.
      gap: whether a space may follow the trigger: SentencePiece writes it.
      separator: between two calls.
      arguments: how the arguments are written; None: as a JSON object.
      spellings: further pairs of ``begin`` and ``middle``. Only formats whose calls are the whole
        text have any.
      numbered: whether NAME is followed by a colon and the number of the call in the conversation.
      id_mark: what stands between NAME and an id, if the model writes one.
      late_id: what stands around an id after the arguments, if the model writes one there.
      single: whether a text has at most one call.
      text: what comes before a text without calls.
      preamble: what stands around text before a call, where calls are not in the midst of text.
      id_length: of ids, in letters and digits; None: they are long.
    """

    begin: str
    middle: str
    end: str
    trigger: str = ""
    section: tuple[str, str] = ("", "")
    gap: bool = False
    separator: str = ""
    arguments: Parameters | None = None
    spellings: tuple[tuple[str, str], ...] = ()
    numbered: bool = False
    id_mark: str = ""
    late_id: tuple[str, str] | None = None
    single: bool = False
    text: str = ""
    preamble: tuple[str, str] | None = None
    id_length: int | None = None

    @property
    def opening(self) -> str:
        """What comes before the name of the first call."""
        return self.section[0] + self.begin

    @property
    def openings(self) -> tuple[str, ...]:
        """The opening, in all ways."""
        spaced = f"{self.trigger} {self.opening.removeprefix(self.trigger)}"
        return (self.opening, *(spaced,) * self.gap)

    @property
    def further(self) -> str:
        """What comes before the name of a further call."""
        return self.separator + self.begin

    @property
    def heads(self) -> tuple[tuple[str, str], ...]:
        """What stands before and after the name, in all ways."""
        return ((self.begin, self.middle), *self.spellings)


DSML = "｜DSML｜"
CALL, CALLS = "tool▁call", "tool▁calls"
DEEPSEEK_CALLS = (f"<｜{CALLS}▁begin｜>", f"<｜{CALLS}▁end｜>")
MISTRAL_ID = 9  # Mistral's templates refuse others

FORMATS = MappingProxyType(
    {
        # Hermes, Qwen 2.5, Qwen3
        "hermes": ToolFormat(
            begin='<tool_call>\n{"name": "',
            middle='", "arguments": ',
            end="}\n</tool_call>",
            trigger="<tool_call>",
            separator="\n",
        ),
        # Llama 3
        "llama3_json": ToolFormat(
            begin='{"name": "', middle='", "parameters": ', end="}", separator="; "
        ),
        # Mistral, tokenizers of version 11 and later. The templates of version 11 have ids.
        "mistral": ToolFormat(
            begin="[TOOL_CALLS]",
            middle="[ARGS]",
            end="",
            trigger="[TOOL_CALLS]",
            id_mark="[CALL_ID]",
            id_length=MISTRAL_ID,
        ),
        # Mistral, versions 2 to 7
        "mistral_v3": ToolFormat(
            begin='{"name": "',
            middle='", "arguments": ',
            end="}",
            trigger="[TOOL_CALLS]",
            section=("[TOOL_CALLS][", "]"),
            gap=True,
            separator=", ",
            late_id=(', "id": "', '"'),
            id_length=MISTRAL_ID,
        ),
        # Llama 4
        "pythonic": ToolFormat(
            begin="",
            middle="(",
            end=")",
            section=("[", "]"),
            separator=", ",
            arguments=Parameters("", "=", "", separator=", ", raw=False, python=True),
        ),
        # LFM2
        "lfm2": ToolFormat(
            begin="",
            middle="(",
            end=")",
            trigger="<|tool_call_start|>",
            section=("<|tool_call_start|>[", "]<|tool_call_end|>"),
            separator=", ",
            arguments=Parameters("", "=", "", separator=", ", raw=False, python=True),
        ),
        # Qwen3-Coder, Qwen3.5, Nemotron 3
        "qwen3_coder": ToolFormat(
            begin="<tool_call>\n<function=",
            middle=">\n",
            end="</function>\n</tool_call>",
            trigger="<tool_call>",
            separator="\n",
            arguments=Parameters("<parameter=", ">\n", "\n</parameter>\n"),
        ),
        # Seed-OSS
        "seed": ToolFormat(
            begin="<seed:tool_call>\n<function=",
            middle=">\n",
            end="</function>\n</seed:tool_call>",
            trigger="<seed:tool_call>",
            separator="\n",
            arguments=Parameters("<parameter=", ">", "</parameter>\n"),
        ),
        # Hy3
        "hy3": ToolFormat(
            begin="<tool_call:opensource>",
            middle="<tool_sep:opensource>\n",
            end="</tool_call:opensource>\n",
            trigger="<tool_calls:opensource>",
            section=("<tool_calls:opensource>\n", "</tool_calls:opensource>"),
            arguments=Parameters(
                "<arg_key:opensource>",
                "</arg_key:opensource>\n<arg_value:opensource>",
                "</arg_value:opensource>\n",
            ),
        ),
        # Granite 3
        "granite": ToolFormat(
            begin='{"name": "',
            middle='", "arguments": ',
            end="}",
            trigger="<|tool_call|>",
            section=("<|tool_call|>[", "]"),
            separator=", ",
        ),
        # GLM-4.5, 4.6
        "glm45": ToolFormat(
            begin="<tool_call>",
            middle="\n",
            end="</tool_call>",
            trigger="<tool_call>",
            separator="\n",
            arguments=Parameters("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
        # GLM-4.7, GLM-5
        "glm47": ToolFormat(
            begin="<tool_call>",
            middle="",
            end="</tool_call>",
            trigger="<tool_call>",
            arguments=Parameters("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
        ),
        # Olmo 3, as vLLM's template has it
        "olmo3": ToolFormat(
            begin="",
            middle="(",
            end=")",
            trigger="<function_calls>",
            section=("<function_calls>\n", "\n</function_calls>"),
            separator="\n",
            arguments=Parameters("", "=", "", separator=", ", raw=False, python=True),
        ),
        # MiniMax-M2
        "minimax_m2": ToolFormat(
            begin='<invoke name="',
            middle='">\n',
            end="</invoke>\n",
            trigger="<minimax:tool_call>",
            section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
            arguments=Parameters('<parameter name="', '">', "</parameter>\n"),
        ),
        # DeepSeek-V3, R1
        "deepseek_v3": ToolFormat(
            begin=f"<｜{CALL}▁begin｜>function<｜tool▁sep｜>",
            middle="\n```json\n",
            end=f"\n```<｜{CALL}▁end｜>",
            trigger=DEEPSEEK_CALLS[0],
            section=DEEPSEEK_CALLS,
            separator="\n",
        ),
        # DeepSeek-V3.1
        "deepseek_v31": ToolFormat(
            begin=f"<｜{CALL}▁begin｜>",
            middle="<｜tool▁sep｜>",
            end=f"<｜{CALL}▁end｜>",
            trigger=DEEPSEEK_CALLS[0],
            section=DEEPSEEK_CALLS,
        ),
        # DeepSeek-V3.2
        "deepseek_v32": ToolFormat(
            begin=f'<{DSML}invoke name="',
            middle='">\n',
            end=f"</{DSML}invoke>\n",
            trigger=f"<{DSML}function_calls>",
            section=(f"<{DSML}function_calls>\n", f"</{DSML}function_calls>"),
            arguments=Parameters(
                f'<{DSML}parameter name="',
                '" string="',
                f"</{DSML}parameter>\n",
                kinds=('true">', 'false">'),
            ),
        ),
        # Kimi K2
        "kimi_k2": ToolFormat(
            begin="<|tool_call_begin|>functions.",
            middle="<|tool_call_argument_begin|>",
            end="<|tool_call_end|>",
            trigger="<|tool_calls_section_begin|>",
            section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            numbered=True,
        ),
        # gpt-oss. Its <|call|> ends the text: it is a stop token. The recipient may come before the
        # channel, as its template has it, and the type without its marker.
        "harmony": ToolFormat(
            begin="<|channel|>commentary to=functions.",
            middle=" <|constrain|>json<|message|>",
            end="",
            spellings=(
                ("<|channel|>commentary to=functions.", " json<|message|>"),
                (" to=functions.", "<|channel|>commentary json<|message|>"),
                (" to=functions.", "<|channel|>commentary <|constrain|>json<|message|>"),
            ),
            single=True,
            text="<|channel|>final<|message|>",
            preamble=("<|channel|>commentary<|message|>", "<|end|><|start|>assistant"),
        ),
    }
)

# What templates have that speak of a format, the most telling first.
TELLING = (
    (f"<{DSML}", "deepseek_v32"),
    (DSML, "deepseek_v32"),
    ("tool_calls_section_begin", "kimi_k2"),
    ("minimax:tool_call", "minimax_m2"),
    ("{function-name}<arg_key>", "glm47"),
    ("<arg_key>", "glm45"),
    ("<function_calls>", "olmo3"),
    ("<seed:tool_call>", "seed"),
    ("<function=", "qwen3_coder"),
    ("[ARGS]", "mistral"),
    ("[TOOL_CALLS]", "mistral_v3"),
    ("<|constrain|>", "harmony"),
    (" to=functions.", "harmony"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
    ('"List of tools: ["', "lfm2"),
    ("<tool_call>", "hermes"),
    ("<|tool_call|>", "granite"),
    ("func_name1(", "pythonic"),
    ('"parameters"', "llama3_json"),
)


def told_format(template: str) -> str:
    """The name of the format that the words of a chat template speak of."""
    if CALLS in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    return next((name for words, name in TELLING if words in template), "hermes")
