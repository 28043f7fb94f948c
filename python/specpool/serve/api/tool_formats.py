"""`FORMATS`: how families of models write calls of functions, as one table.

Each format is a few regular expressions of the `regex` library, whose partial matches say whether
further text could still complete one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import regex

#: How the arguments are written: in the JSON object of the call; as a JSON object of their own; as
#: one tag for each; as keywords of a Python call; or as Gemma's objects, whose keys have no quotes.
Kind = Literal["object", "json", "tags", "python", "gemma"]

# Blanks between the parts of a call. The limit keeps a flood of them from being read again and
# again.
_W = r"\s{0,64}"
_NAME = r"(?P<name>[\w-]{1,64})"
#: A call whose arguments stand in its object. Other objects are content from their first key on.
_OBJECT = (
    rf'(?=\{{{_W}"(?:name|type|id|function|arguments|parameters|tool_name|tool_call_id)"{_W}:)'
)
#: The begin of such an object up to the arguments, if they come right behind the name.
OBJECT_HEAD = regex.compile(
    rf'\{{{_W}(?:"(?:type|id|tool_call_id)"{_W}:{_W}"[\w-]{{0,64}}"{_W},{_W}){{0,3}}'
    rf'"(?:tool_)?name"{_W}:{_W}"{_NAME}"{_W},{_W}"(?:arguments|parameters)"{_W}:{_W}(?=\{{)'
)
#: What such an object has behind the arguments: its end, or a member, up to a value of several
#: values.
OBJECT_REST = regex.compile(
    rf'{_W}(?:(?P<end>\}})|,{_W}"[^"\\]{{0,64}}"{_W}:{_W}'
    # A number goes on with the next text, unless something else stands behind it.
    r'(?:"(?:[^"\\]|\\.){0,256}"|[\w.+-]{1,64}(?=[^\w.+-])|(?P<nested>(?=[\[{]))))'
)
#: A brace that models write once too often.
_BRACE = rf"(?:{_W}\}})?"
#: A model's thoughts begin a text, or are begun at a prompt's end.
THOUGHTS_BEGIN = regex.compile(r"<(?:seed:)?think>|\[THINK\]")
#: Behind a model's thoughts a text begins anew.
THOUGHTS_END = regex.compile(r"</(?:seed:)?think>|\[/THINK\]")


@dataclass(frozen=True, eq=False)
class Format:
    """One way to write calls.

    `begin` to `value_end` are regular expressions.

    Attributes:
        families: the models that write so, for the documentation.
        marks: a model writes so if its chat template has one of these; none = any model may.
        kind: how the arguments are written.
        begin: what stands before the first call.
        call: a call up to its arguments; its group `name` is the function's, and a group `id` the
            call's id, where the model's next prompt shows it.
        end: what may follow a call's arguments.
        between: what stands between `end` and the next call; None means each call has its `begin`.
        close: what may follow the last call.
        key: the begin of an argument in tags; its group `key` is the argument's name.
        value_end: the end of an argument in tags, or what can only stand behind a missing end.
    """

    families: str
    marks: tuple[str, ...]
    kind: Kind
    begin: str
    call: str = _OBJECT
    end: str = ""
    between: str | None = None
    close: str = ""
    key: str = ""
    value_end: str = ""

    @cached_property
    def first(self) -> regex.Pattern[str]:
        """The text up to the arguments of the first call."""
        return regex.compile(self.begin + self.call)

    @cached_property
    def next(self) -> regex.Pattern[str] | None:
        """The text from the arguments of one call to those of the next."""
        return None if self.between is None else regex.compile(self.end + self.between + self.call)

    @cached_property
    def last(self) -> regex.Pattern[str]:
        """The text behind the last arguments."""
        return regex.compile(self.end + self.close)

    @cached_property
    def key_pattern(self) -> regex.Pattern[str]:
        """The text between the values of two tags."""
        return regex.compile(self.key)

    @cached_property
    def value_end_pattern(self) -> regex.Pattern[str]:
        """The text behind a tag's value."""
        return regex.compile(self.value_end)


def _objects(families: str, mark: str, close: str = "") -> Format:
    """Return the format of JSON objects, alone or in a list, between two texts."""
    return Format(
        families,
        (mark,) if mark else (),
        "object",
        begin=rf"{regex.escape(mark)}{_W}\[?{_W}",
        end=_BRACE,
        between=rf"{_W}[,;]?{_W}",
        close=rf"(?:{_W}\])?" + _may(close),
    )


def _calls(families: str, marks: tuple[str, ...], begin: str, close: str) -> Format:
    """Return the format of Python calls with keywords, one behind another or in a list."""
    return Format(
        families,
        marks,
        "python",
        begin=begin,
        call=rf"{_NAME}(?:\.call)?\(",
        between=rf"{_W}(?:,|;|\n){_W}",
        close=rf"(?:{_W}\])?" + close,
    )


def _may(text: str) -> str:
    """Return a pattern for a text that may come, behind blanks that only come with it."""
    return f"(?:{_W}{regex.escape(text)})?" if text else ""


def _tags(families: str, marks: tuple[str, ...], **patterns: str) -> Format:
    return Format(families, marks, "tags", **patterns)


FORMATS = (
    # JSON objects.
    _objects("Qwen, Hermes, Granite 4, EXAONE, ERNIE, SmolLM3", "<tool_call>", "</tool_call>"),
    _objects("Mistral to v7", "[TOOL_CALLS]"),
    _objects("Llama 3", "<|python_tag|>", "<|eom_id|>"),
    _objects("Granite 3, Phi-4-mini", "<|tool_call|>", "<|/tool_call|>"),
    _objects("Nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    _objects("Jamba, Hunyuan", "<tool_calls>", "</tool_calls>"),
    _objects("Command", "<|START_ACTION|>", "<|END_ACTION|>"),
    Format(
        "Command R",
        ("<|CHATBOT_TOKEN|>",),
        "object",
        begin=rf"Action:{_W}```json{_W}\[?{_W}",
        end=_BRACE,
        between=rf"{_W},{_W}",
        close=rf"(?:{_W}\])?" + _may("```"),
    ),
    _objects("InternLM", "<|action_start|><|plugin|>", "<|action_end|>"),
    _objects("LongCat", "<longcat_tool_call>", "</longcat_tool_call>"),
    _objects("GigaChat 3.1", "<|function_call|>"),
    _objects("Phi-4-mini", "functools"),
    _objects("Llama 3, xLAM", ""),
    # A name, and a JSON object with the arguments.
    Format(
        "Mistral from v11",
        ("[TOOL_CALLS]",),
        "json",
        begin=r"\[TOOL_CALLS\]",
        call=rf"{_NAME}(?:\[CALL_ID\]\w{{1,32}})?(?:\[ARGS\])?(?=\{{)",
        end=_BRACE,
    ),
    Format(
        "Llama 3.1 with functions of its own",
        ("<function=",),
        "json",
        begin="<function=",
        call=rf"{_NAME}>{_W}(?=\{{)",
        end=_BRACE + _may("</function>"),
    ),
    Format(
        "DeepSeek V3, R1, V3.1",
        ("<｜tool▁call▁begin｜>",),
        "json",
        begin=rf"(?:<｜tool▁calls▁begin｜>{_W})?<｜tool▁call▁begin｜>",
        call=(rf"(?:function<｜tool▁sep｜>)?{_NAME}(?:<｜tool▁sep｜>)?{_W}(?:```json)?{_W}(?=\{{)"),
        end=_BRACE + _may("```") + _may("<｜tool▁call▁end｜>"),
        between=rf"{_W}<｜tool▁call▁begin｜>",
        close=_may("<｜tool▁calls▁end｜>"),
    ),
    Format(
        "Kimi K2, Kimi Linear",
        ("<|tool_call_begin|>",),
        "json",
        begin=rf"(?:<\|tool_calls_section_begin\|>{_W})?<\|tool_call_begin\|>{_W}",
        call=(
            rf"(?:(?P<id>functions\.{_NAME}:\d{{1,9}})|(?:functions\.)?{_NAME}(?::\d{{1,9}})?)"
            rf"{_W}<\|tool_call_argument_begin\|>{_W}(?=\{{)"
        ),
        end=_BRACE + _may("<|tool_call_end|>"),
        between=rf"{_W}<\|tool_call_begin\|>{_W}",
        close=_may("<|tool_calls_section_end|>"),
    ),
    Format(
        "gpt-oss",
        ("<|channel|>",),
        "json",
        begin=rf"(?:<\|start\|>assistant)?(?:<\|channel\|>(?:commentary|analysis))?{_W}",
        call=(
            rf"to=functions\.{_NAME}{_W}(?:<\|channel\|>(?:commentary|analysis))?{_W}"
            rf"(?:<\|constrain\|>)?\w{{0,16}}{_W}<\|message\|>{_W}(?=\{{)"
        ),
        end=_BRACE + _may("<|call|>"),
    ),
    Format(
        "Apertus",
        ("<|tools_prefix|>",),
        "json",
        begin=rf"<\|tools_prefix\|>{_W}\[{_W}",
        call=rf'\{{{_W}"{_NAME}"{_W}:{_W}(?=\{{)',
        end=_may("}"),
        between=rf"{_W},{_W}",
        close=_may("]") + _may("<|tools_suffix|>"),
    ),
    # One tag for each argument.
    _tags(
        "Qwen3-Coder, Qwen3.5, Nemotron 3, MiMo, Seed-OSS",
        ("<function=",),
        begin=rf"(?:<(?:seed:)?tool_call>{_W})?<function=",
        call=rf"{_NAME}>{_W}(?=<parameter=|</function>)",
        key=rf"{_W}<parameter=(?P<key>[^>\n]{{1,256}})>(?:\n|(?=[^\n]))",
        value_end=(
            r"\n?</parameter>|(?=\n<parameter=[\w.-]{1,64}>)"
            rf"|(?=\n?</function>{_W}(?:</(?:seed:)?tool_call>|<function=))"
        ),
        end=_may("</function>"),
        between=rf"{_W}<function=",
        close=rf"(?:{_W}</(?:seed:)?tool_call>)?",
    ),
    _tags(
        "GLM 4.5, Laguna, Hunyuan V3",
        ("<arg_key>",),
        begin=rf"(?:<tool_calls>{_W})?<tool_call>{_W}",
        call=rf"{_NAME}{_W}(?:<tool_sep>)?{_W}(?=<arg_key>|</tool_call>)",
        key=rf"{_W}<arg_key>(?P<key>[^<]{{1,256}})</arg_key>{_W}<arg_value>",
        value_end=(rf"</arg_value>|(?=\n?<arg_key>[\w.-]{{1,64}}</arg_key>{_W}<arg_value>)"),
        end=_may("</tool_call>"),
        between=rf"{_W}<tool_call>{_W}",
        close=_may("</tool_calls>"),
    ),
    _tags(
        "MiniMax M2, dots",
        ("<invoke name=", "<minimax:tool_call>", "<dots_function_call>"),
        begin=rf"(?:<(?:minimax:tool_call|dots_function_call)>{_W})?<invoke name=",
        call=rf'"?{_NAME}"?>{_W}(?=<parameter name=|</invoke>)',
        key=rf'{_W}<parameter name="?(?P<key>[^">\n]{{1,256}})"?>',
        value_end=(
            r'</parameter>|(?=\n<parameter name="[\w.-]{1,64}">)'
            rf"|(?=\n?</invoke>{_W}<(?:/(?:minimax:tool_call|dots_function_call)>|invoke name=))"
        ),
        end=_may("</invoke>"),
        between=rf"{_W}<invoke name=",
        close=rf"(?:{_W}</(?:minimax:tool_call|dots_function_call)>)?",
    ),
    # Python calls.
    _calls(
        "LFM2, MiniCPM3",
        ("<|tool_call_start|>",),
        rf"<\|tool_call_start\|>{_W}(?:```python)?{_W}\[?{_W}",
        _may("```") + _may("<|tool_call_end|>"),
    ),
    _calls(
        "OLMo 3",
        ("<function_calls>",),
        rf"<function_calls>{_W}\[?{_W}",
        _may("</function_calls>"),
    ),
    _calls("Gemma 3", ("tool_code",), rf"```tool_code{_W}\[?{_W}", _may("```")),
    _calls("Llama 3", ("<|python_tag|>",), r"<\|python_tag\|>", _may("<|eom_id|>")),
    _calls("Llama 4, Llama 3.2", (), rf"(?:<\|python_start\|>)?\[{_W}", _may("<|python_end|>")),
    # Gemma's own objects.
    Format(
        "Gemma 4",
        ("<|tool_call>",),
        "gemma",
        begin=rf"<\|tool_call>{_W}",
        call=rf"call:{_NAME}(?=\{{)",
        end=rf"<tool_call\|>|(?=<\|tool_call>{_W}call:)",
    ),
    Format(
        "FunctionGemma",
        ("<start_function_call>",),
        "gemma",
        begin=rf"<start_function_call>{_W}",
        call=rf"call:{_NAME}(?=\{{)",
        end=rf"<end_function_call>|(?=<start_function_call>{_W}call:)",
    ),
)


def formats_of(template: object) -> tuple[Format, ...]:
    """Return the formats whose marks a chat template has; all of them if it has none.

    Args:
        template: Jinja, or several templates by their names.
    """
    text = str(template or "")
    if not any(mark in text for mark in _marks()):
        return FORMATS
    return tuple(
        form for form in FORMATS if not form.marks or any(mark in text for mark in form.marks)
    )


def _marks() -> Iterator[str]:
    return (mark for form in FORMATS for mark in form.marks)
