"""How families of models write calls: a small chat template of our own for each.

`Family.answer` renders an assistant's message with the family's template, as the history would show
it; this is the text that the model says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

#: A chat; `CALLS` stands for the family's own form of `calls`.
_SHELL = (
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}[A]{{ m.content }}"
    "{%- if m.tool_calls %}{% set calls = m.tool_calls | map(attribute='function') | list %}"
    "CALLS{% endif %}[E]"
    "{%- else %}[{{ m.role }}]{{ m.content }}[E]{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}[A]{% endif %}"
)
#: Something for each call, with a text between two.
_EACH = "{%% for c in calls %%}%s{%% if not loop.last %%}%s{%% endif %%}{%% endfor %%}"
_RAW = "{{ v if v is string else v | tojson }}"
_OBJECT = '{"name": {{ c.name | tojson }}, "arguments": {{ c.arguments | tojson }}}'
_PYTHON = (
    "{{ c.name }}({% for k, v in c.arguments.items() %}{{ k }}={{ '%r' | format(v) }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})"
)
#: Gemma's values, whose strings stand between two marks.
_GEMMA = """
{%- macro value(v, q) -%}
{%- if v is string %}{{ q }}{{ v }}{{ q }}
{%- elif v is mapping %}{{ '{' }}{% for k, x in v.items() %}{{ k }}:{{ value(x, q) }}
{%- if not loop.last %},{% endif %}{% endfor %}{{ '}' }}
{%- elif v is sequence %}[{% for x in v %}{{ value(x, q) }}{% if not loop.last %},{% endif %}
{%- endfor %}]
{%- elif v is boolean %}{{ 'true' if v else 'false' }}
{%- else %}{{ v }}{% endif %}
{%- endmacro -%}"""


def _per_call(call: str, between: str = "") -> str:
    return _EACH % (call, between)


def _tags(begin: str, tag: str, end: str) -> str:
    return f"{begin}{{% for k, v in c.arguments.items() %}}{tag}{{% endfor %}}{end}"


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        calls: Jinja that writes `calls`.
        specials: the marks that are special tokens.
        kind: how the arguments are written, as in `Format`.
    """

    calls: str
    specials: tuple[str, ...] = ()
    kind: str = "object"

    @cached_property
    def template(self) -> str:
        """The chat template."""
        # A line's end behind a block is left out, so each is printed.
        return _GEMMA + _SHELL.replace("CALLS", self.calls.replace("\n", "{{ '\\n' }}"))

    def answer(self, content: str, calls: list[dict[str, Any]]) -> list[tuple[str, bool]]:
        """What the model says, in pieces: each with whether it is a special token."""
        message = {"role": "assistant", "content": content, "tool_calls": calls}
        (text,), _ = render_jinja_template(conversations=[[message]], chat_template=self.template)
        return self.pieces(text.removeprefix("[A]").removesuffix("[E]"))

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """Split a text at the special tokens."""
        if not self.specials:
            return [(text, False)]
        parts = re.split("(" + "|".join(map(re.escape, self.specials)) + ")", text)
        return [(part, number % 2 == 1) for number, part in enumerate(parts) if part]


FAMILIES = {
    "qwen": Family(_per_call(f"<tool_call>\n{_OBJECT}\n</tool_call>", "\n")),
    "qwen_special": Family(
        _per_call(f"<tool_call>\n{_OBJECT}\n</tool_call>", "\n"), ("<tool_call>", "</tool_call>")
    ),
    "mistral_v3": Family("[TOOL_CALLS][" + _per_call(_OBJECT, ", ") + "]", ("[TOOL_CALLS]",)),
    "llama3_tag": Family(
        "<|python_tag|>" + _per_call(_OBJECT.replace('arguments"', 'parameters"'), "; "),
        ("<|python_tag|>",),
    ),
    "granite3": Family("<|tool_call|>[" + _per_call(_OBJECT, ",") + "]", ("<|tool_call|>",)),
    "phi4_mini": Family(
        "<|tool_call|>[" + _per_call(_OBJECT, ", ") + "]<|/tool_call|>",
        ("<|tool_call|>", "<|/tool_call|>"),
    ),
    "functools": Family("functools[" + _per_call(_OBJECT, ", ") + "]"),
    "nemotron": Family("<TOOLCALL>[" + _per_call(_OBJECT, ", ") + "]</TOOLCALL>"),
    "jamba": Family("<tool_calls>[\n" + _per_call(_OBJECT, ",\n") + "\n]</tool_calls>"),
    "command": Family(
        "<|START_ACTION|>[\n"
        + _per_call(
            '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": {{ c.name | tojson }}, '
            '"parameters": {{ c.arguments | tojson }}}',
            ",\n",
        )
        + "\n]<|END_ACTION|>",
        ("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    "command_r": Family(
        "{# <|CHATBOT_TOKEN|> #}Action:\n```json\n[\n"
        + _per_call(
            '    {{ "{" }}\n        "tool_name": {{ c.name | tojson }},\n'
            '        "parameters": {{ c.arguments | tojson }}}',
            ",\n",
        )
        + "\n]```"
    ),
    "longcat": Family(_per_call(f"<longcat_tool_call>{_OBJECT}</longcat_tool_call>", "\n")),
    "gigachat": Family(_per_call(f"<|function_call|>{_OBJECT}"), ("<|function_call|>",)),
    "mistral_v13": Family(
        _per_call("[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}"),
        ("[TOOL_CALLS]", "[ARGS]"),
        "json",
    ),
    "llama31_function": Family(
        _per_call("<function={{ c.name }}>{{ c.arguments | tojson }}</function>", "\n"), kind="json"
    ),
    "deepseek_v3": Family(
        "<｜tool▁calls▁begin｜>"
        + _per_call(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n"
            "{{ c.arguments | tojson }}\n```<｜tool▁call▁end｜>",
            "\n",
        )
        + "<｜tool▁calls▁end｜>",
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
        "json",
    ),
    "deepseek_v31": Family(
        "<｜tool▁calls▁begin｜>"
        + _per_call(
            "<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>{{ c.arguments | tojson }}"
            "<｜tool▁call▁end｜>"
        )
        + "<｜tool▁calls▁end｜>",
        kind="json",
    ),
    "kimi": Family(
        "<|tool_calls_section_begin|>"
        + _per_call(
            "<|tool_call_begin|>functions.{{ c.name }}:{{ loop.index0 }}"
            "<|tool_call_argument_begin|>{{ c.arguments | tojson }}<|tool_call_end|>"
        )
        + "<|tool_calls_section_end|>",
        (
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ),
        "json",
    ),
    "gpt_oss": Family(
        _per_call(
            "<|start|>assistant<|channel|>commentary to=functions.{{ c.name }} "
            "<|constrain|>json<|message|>{{ c.arguments | tojson }}<|call|>"
        ),
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"),
        "json",
    ),
    "gpt_oss_role": Family(
        _per_call(
            "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
            "{{ c.arguments | tojson }}<|call|>"
        ),
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"),
        "json",
    ),
    "apertus": Family(
        "<|tools_prefix|>["
        + _per_call("{{ '{' }}{{ c.name | tojson }}: {{ c.arguments | tojson }}{{ '}' }}", ", ")
        + "]<|tools_suffix|>",
        ("<|tools_prefix|>", "<|tools_suffix|>"),
        "json",
    ),
    "qwen3_coder": Family(
        _per_call(
            "<tool_call>\n"
            + _tags(
                "<function={{ c.name }}>\n",
                f"<parameter={{{{ k }}}}>\n{_RAW}\n</parameter>\n",
                "</function>\n</tool_call>",
            ),
            "\n",
        ),
        kind="tags",
    ),
    "seed_oss": Family(
        _per_call(
            "<seed:tool_call>\n"
            + _tags(
                "<function={{ c.name }}>\n",
                "<parameter={{ k }}>{{ v if v is string else '%r' | format(v) }}</parameter>\n",
                "</function>\n</seed:tool_call>",
            ),
            "\n",
        ),
        kind="tags",
    ),
    "glm": Family(
        _per_call(
            _tags(
                "<tool_call>{{ c.name }}\n",
                f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_RAW}</arg_value>\n",
                "</tool_call>",
            ),
            "\n",
        ),
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        "tags",
    ),
    "hunyuan_v3": Family(
        "<tool_calls>"
        + _per_call(
            _tags(
                "<tool_call>{{ c.name }}<tool_sep>",
                f"<arg_key>{{{{ k }}}}</arg_key><arg_value>{_RAW}</arg_value>",
                "</tool_call>",
            )
        )
        + "</tool_calls>",
        kind="tags",
    ),
    "minimax": Family(
        "\n<minimax:tool_call>\n"
        + _per_call(
            _tags(
                '<invoke name="{{ c.name }}">\n',
                f'<parameter name="{{{{ k }}}}">{_RAW}</parameter>\n',
                "</invoke>\n",
            )
        )
        + "</minimax:tool_call>",
        kind="tags",
    ),
    "lfm2": Family(
        "<|tool_call_start|>[" + _per_call(_PYTHON, ", ") + "]<|tool_call_end|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        "python",
    ),
    "olmo3": Family(
        "<function_calls>\n" + _per_call(_PYTHON, "\n") + "\n</function_calls>", kind="python"
    ),
    "gemma3": Family("```tool_code\n" + _per_call(_PYTHON, "\n") + "\n```", kind="python"),
    "gemma4": Family(
        _per_call("<|tool_call>call:{{ c.name }}{{ value(c.arguments, '<|\"|>') }}<tool_call|>"),
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
        "gemma",
    ),
    "function_gemma": Family(
        _per_call(
            "<start_function_call>call:{{ c.name }}{{ value(c.arguments, '<escape>') }}"
            "<end_function_call>"
        ),
        kind="gemma",
    ),
}

#: Families without a mark: a call begins the text, or follows the thoughts.
BARE = {
    "llama3": Family(_per_call(_OBJECT.replace('arguments"', 'parameters"'), "; ")),
    "xlam": Family("[" + _per_call(_OBJECT, ", ") + "]"),
    "llama4": Family("[" + _per_call(_PYTHON, ", ") + "]", kind="python"),
}
ALL = FAMILIES | BARE
