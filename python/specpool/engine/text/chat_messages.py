"""The history of a chat as templates expect it, and the choice among named templates."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any

from specpool.errors import ConfigError

Message = Mapping[str, Any]

#: Stands within each name of a token that a tool's result spells, which may not become that token.
#: It is a lone surrogate, which no valid text has.
SEAM = "\udfff"

#: The roles of messages with a tool's result.
RESULT_ROLES = frozenset({"tool", "function", "ipython", "tool_results", "observation"})
#: How Mistral's templates look at a call's id: they refuse those that are not of nine characters.
_NINE = re.compile(r"\|\s*length\s*(?:!=|==|<)\s*9\b")
#: A template that knows the role `developer`; Apertus' has tokens of such a name alone.
_DEVELOPER = re.compile(r"""(["'])developer\1""")
#: Kimi's templates show a call's id alone, which must hold the function's name and a number.
_KIMI = "<|tool_call_begin|>"
#: The mark of gpt-oss' form, in which each message names its channel.
CHANNEL = "<|channel|>"
#: Names of a message's thoughts, as transformers reads them. Templates of gpt-oss' form refuse an
#: answer of calls that has both thoughts and a content.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
#: Where a template may read thoughts only with variables of the request, such as `reasoning`.
_NAMES_THOUGHTS = re.compile(r"reasoning_content|\.(?:thinking|reasoning)\b")
#: Half of a character, which a model can escape in the arguments of a call; no text may have it.
_SURROGATE = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a chat template expects the calls of an assistant's message.

    Attributes:
        has_objects: the arguments are objects; if not, JSON text.
        empty_content: the content of a message that is calls alone.
        has_both: a message shows its calls beside its content; if not, they need a message of
            their own.
        has_several: a message shows all of its calls; if not, each needs a message of its own.
    """

    has_objects: bool = True
    empty_content: str | None = ""
    has_both: bool = True
    has_several: bool = True


class ThoughtForm(Enum):
    """How a chat template expects the thoughts of an assistant's message."""

    FIELD = "a field of the message, as transformers has it"
    OTHER_FIELD = "a field of another name"
    TEXT_PART = "a part of the content, with a text"
    LIST_PART = "a part of the content, with a list of parts"
    BLOCKS = "a block of the content, which has blocks in each answer"


#: A chat whose rendering shows how a template reads calls.
PROBE_CONTENT, PROBE_FUNCTION, _PROBE_ARGUMENT = "probe-answer", "probe_function", "probe_argument"
PROBE_USER = {"role": "user", "content": "probe-text"}
PROBE_CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00000",
            "type": "function",
            "function": {"name": PROBE_FUNCTION, "arguments": {_PROBE_ARGUMENT: True}},
        }
    ],
}
_SECOND_FUNCTION = "probe_second"
_PROBE_CALLED_TWICE = PROBE_CALLED | {
    "tool_calls": [
        *PROBE_CALLED["tool_calls"],
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": _SECOND_FUNCTION, "arguments": {_PROBE_ARGUMENT: True}},
        },
    ]
}
PROBE_RESULT = {
    "role": "tool",
    "tool_call_id": "call00000",
    "name": PROBE_FUNCTION,
    "content": "probe-result",
}
#: A tool beside such a chat. It is none of its calls', because a text with its name shows no call.
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe-description",
        "parameters": {
            "type": "object",
            "properties": {"probe": {"type": "string", "description": "probe-description"}},
            "required": ["probe"],
        },
    },
}


def call_form(render: Callable[[Sequence[Message], CallForm], str | None]) -> CallForm:
    """Return the form of calls that a template shows; if it shows none, the usual one.

    Most templates expect objects and write JSON of them. Some print what they get, which would be
    Python's text of an object, or join it to other text, which is an error. DeepSeek's show calls
    only where the content is None.

    Args:
        render: renders messages in a form; None if the template refuses them.
    """
    for content in ("", None):
        for has_objects in (True, False):
            form = CallForm(has_objects, content)
            text = render([PROBE_USER, PROBE_CALLED], form)
            if text is not None and _shows_call(text) and not _prints_python(text):
                chat = [PROBE_USER, PROBE_CALLED | {"content": PROBE_CONTENT}]
                both = render(chat, form)
                has_both = both is None or _shows_call(both)
                return replace(form, has_both=has_both, has_several=_has_several(render, form))
    return CallForm()


def _has_several(
    render: Callable[[Sequence[Message], CallForm], str | None], form: CallForm
) -> bool:
    """Return whether a message shows several calls, or they are not shown in any way.

    Llama 3.1's templates refuse a second call, and gpt-oss' leave it out.
    """
    chat = [PROBE_USER, _PROBE_CALLED_TWICE]
    if _SECOND_FUNCTION in (render(chat, form) or ""):
        return True
    return _SECOND_FUNCTION not in (render(chat, replace(form, has_several=False)) or "")


def _shows_call(text: str) -> bool:
    return PROBE_FUNCTION in text or _PROBE_ARGUMENT in text


def _prints_python(text: str) -> bool:
    """Return whether the arguments stand in a text as Python writes them, alone."""
    python = str({_PROBE_ARGUMENT: True})
    return python in text.replace(f"'arguments': {python}", "")


_PROBE_THOUGHT = "probe-thought"
#: A content that is not a text, as Python or JSON write it.
_PRINTED_PARTS = re.compile(r"""(["'])(?:thinking|thoughts)\1""")


def thoughts_of(message: Message) -> str:
    """Return the thoughts of an assistant's message; "" if it has none."""
    if message.get("role") != "assistant":
        return ""
    values = (message.get(name) for name in THOUGHTS)
    thoughts = next((value for value in values if value is not None), "")
    return thoughts if isinstance(thoughts, str) else ""


def thought_form(
    template: str, render: Callable[[Sequence[Message], ThoughtForm], str | None]
) -> ThoughtForm | None:
    """Return the form of thoughts that a template shows; None if it shows none.

    Most templates read a field. Ministral's read a part of the content, Apertus' a block. A form
    counts only if the message's content or call is shown beside the thoughts.

    Args:
        template: Jinja.
        render: renders messages in a form; None if the template refuses them.
    """
    thinks = {"reasoning_content": _PROBE_THOUGHT}
    said = {"role": "assistant", "content": PROBE_CONTENT} | thinks
    chats = (
        ([PROBE_USER, said], PROBE_CONTENT),
        ([PROBE_USER, PROBE_CALLED | thinks, PROBE_RESULT], PROBE_FUNCTION),
    )
    for form in ThoughtForm:
        for chat, mark in chats:
            text = render(chat, form) or ""
            if _PROBE_THOUGHT in text and mark in text and not _PRINTED_PARTS.search(text):
                return form
    return ThoughtForm.FIELD if _NAMES_THOUGHTS.search(template) else None


def with_blank_answers(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return copies in which each assistant's message without content and calls is a space.

    Some templates refuse an empty one, which is what an answer is that was cut off in its thoughts.
    """
    return [
        {**message, "content": " "}
        if message.get("role") == "assistant"
        and not message.get("content")
        and not message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def tool_forms(variables: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a template's variables, and then with the tools as templates want them that refuse.

    A function may leave out its description and its parameters, and they their descriptions; they
    are empty then. Apertus' template takes the functions alone, without the tools around them.
    """
    yield variables
    tools = variables.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        return
    functions = [
        _whole(tool["function"]) if isinstance(tool.get("function"), Mapping) else tool
        for tool in tools
    ]
    pairs = zip(tools, functions, strict=True)
    yield {**variables, "tools": [{**tool, "function": function} for tool, function in pairs]}
    yield {**variables, "tools": functions}


def _whole(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function with a description and parameters, and descriptions of these."""
    parameters = function.get("parameters")
    parameters = parameters if isinstance(parameters, Mapping) else {}
    properties = parameters.get("properties")
    described = {
        key: {"description": "", **value} if isinstance(value, Mapping) else value
        for key, value in (properties if isinstance(properties, Mapping) else {}).items()
    }
    whole = {"type": "object", **parameters, "properties": described}
    return {"description": "", **function, "parameters": whole}


def template_of(templates: str | Mapping[str, str], variables: Mapping[str, Any]) -> str:
    """Return the chat template for these variables, of one or of several by their names.

    With tools it is `tool_use`, as in transformers; with `documents` it is `rag`; without such a
    name, or otherwise, `default`.

    Raises:
        ConfigError: there is no such template.
    """
    if isinstance(templates, str):
        return templates
    wanted = [("tools", "tool_use"), ("documents", "rag")]
    names = [name for variable, name in wanted if variables.get(variable)]
    for name in (*names, "default"):
        if name in templates:
            return templates[name]
    listed = ", ".join(map(repr, sorted(templates)))
    raise ConfigError(
        f"the tokenizer has the chat templates {listed}, but no 'default' for this chat: set one "
        "template as the tokenizer's chat_template, on the command line with --chat-template"
    )


def prepared(
    messages: Sequence[Message],
    template: str,
    *,
    form: CallForm = CallForm(),
    thought_form: ThoughtForm | None = ThoughtForm.FIELD,
    has_parts: bool = False,
) -> list[dict[str, Any]]:
    """Return copies of messages in the form that a template expects.

    Fields without a value are left out: None, and empty lists beside the content. The arguments of
    calls, which OpenAI's interface has as JSON text, become objects. A text that is not an object
    stays as it is. Half of an escaped character in arguments, a lone surrogate, becomes U+FFFD:
    the client sends back what it got. The role `developer` becomes `system` if the template does
    not know it. If the template wants ids of nine characters, other ids of calls become such; if
    it is Kimi's, they become `functions.name:number`. If it is gpt-oss', an answer of calls with
    a content has no thoughts.

    Args:
        messages: plain data; each content is a string.
        template: Jinja.
        form: how the template expects calls.
        thought_form: how it expects thoughts; None if it does not read them.
        has_parts: each content becomes a list of one text part.
    """
    has_nine = _NINE.search(template) is not None
    copies = []
    for message in messages if form.has_several else _with_single_calls(messages):
        copy = {
            key: value
            for key, value in message.items()
            if value is not None and (value != [] or key == "content")
        }
        if copy.get("role") == "developer" and not _DEVELOPER.search(template):
            copy["role"] = "system"
        if isinstance(calls := copy.get("tool_calls"), list):
            copy["tool_calls"] = [_call(call, form.has_objects) for call in calls]
            if CHANNEL in template and copy.get("content"):
                copy = {key: value for key, value in copy.items() if key not in THOUGHTS}
        if has_nine:
            copy = _with_short_ids(copy)
        for part in _with_shown_calls(copy, form):
            part = _with_shown_thoughts(part, thought_form)
            content = part.get("content")
            if has_parts and (content is None or isinstance(content, str)):
                part["content"] = [{"type": "text", "text": content or ""}]
            copies.append(part)
    return _with_kimi_ids(copies) if _KIMI in template else copies


def with_seams(
    messages: Sequence[Message], template: str, added: Mapping[str, bool]
) -> list[dict[str, Any]]:
    """Return copies of messages in which no tool's result has the name of a control token.

    A web page or a file could otherwise end its message and begin one of the system's. Each name
    has a `SEAM` behind its first character, at which the rendered chat is cut before it is
    tokenized. Control tokens are special, or stand in the template.

    Args:
        messages: plain data; each content is a string.
        template: Jinja.
        added: the tokenizer's added tokens by their names, each with whether it is special.
    """
    names = [
        name
        for name, special in added.items()
        if len(name) > 1 and name.strip() and (special or name in template)
    ]
    if not names:
        return [dict(message) for message in messages]
    starts = _starts(tuple(names))
    return [
        {**message, "content": starts.sub(rf"\1{SEAM}", message["content"])}
        if message.get("role") in RESULT_ROLES
        else dict(message)
        for message in messages
    ]


@lru_cache(16)
def _starts(names: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of the character with which any of these names begins."""
    return re.compile(f"(?={_any_of(names)})(.)", re.DOTALL)


def _any_of(names: Sequence[str]) -> str:
    """Return a pattern that finds one of these names, if there is one.

    Names with the same first characters share them: a tokenizer may have thousands, and if each
    was tried at each place, a long text would keep all threads waiting for seconds.
    """
    if "" in names:
        return ""
    low, high = min(names), max(names)
    num = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    if num:
        return re.escape(low[:num]) + _any_of([name[num:] for name in names])
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name[0], []).append(name)
    return f"(?:{'|'.join(map(_any_of, groups.values()))})"


def _with_shown_calls(message: dict[str, Any], form: CallForm) -> list[dict[str, Any]]:
    """Return a message, or the two that show its content and its calls."""
    if message.get("role") != "assistant" or not (calls := message.get("tool_calls")):
        return [message]
    if not message.get("content"):
        return [message | {"content": form.empty_content}]
    if form.has_both:
        return [message]
    said = {key: value for key, value in message.items() if key != "tool_calls"}
    return [said, {"role": "assistant", "content": form.empty_content, "tool_calls": calls}]


def _with_shown_thoughts(message: dict[str, Any], form: ThoughtForm | None) -> dict[str, Any]:
    """Return a message whose thoughts stand where a template reads them."""
    if message.get("role") != "assistant" or form in (None, ThoughtForm.FIELD):
        return message
    thoughts, content = thoughts_of(message), message.get("content")
    if form is ThoughtForm.BLOCKS:
        pairs = (("thoughts", thoughts), ("response", content))
        blocks = [{"type": kind, "text": text} for kind, text in pairs if text]
        return message | {"content": {"blocks": blocks}}
    if not thoughts:
        return message
    if form is ThoughtForm.OTHER_FIELD:
        return dict.fromkeys(("thought", "tool_plan"), thoughts) | message
    text_part = {"type": "text", "text": thoughts}
    parts = [
        {"type": "thinking", "thinking": thoughts if form is ThoughtForm.TEXT_PART else [text_part]}
    ]
    if content or not message.get("tool_calls"):  # a text that may go on
        parts.append({"type": "text", "text": content or ""})
    return message | {"content": parts}


def _with_single_calls(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages with at most one call each; its result follows it."""
    start = 0
    while start < len(messages):
        message = messages[start]
        start += 1
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or len(calls) < 2:
            yield message
            continue
        end = start
        while end < len(messages) and messages[end].get("role") in RESULT_ROLES:
            end += 1
        numbers: dict[str, list[int]] = {}  # of the results, by their calls' ids; latest first
        for number in reversed(range(start, end)):
            numbers.setdefault(str(messages[number].get("tool_call_id")), []).append(number)
        left = dict.fromkeys(range(start, end))
        for index, call in enumerate(calls):
            alone = {"role": message.get("role"), "content": ""} if index else message
            yield {**alone, "tool_calls": [call]}
            ident = call.get("id") if isinstance(call, Mapping) else None
            if isinstance(ident, str) and numbers.get(ident):
                number = numbers[ident].pop()
                del left[number]
                yield messages[number]
        yield from (messages[number] for number in left)
        start = end


def _call(call: Any, has_objects: bool) -> Any:
    """Return a copy of a call whose arguments are an object, or JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if has_objects and not arguments:
        arguments = {}
    elif has_objects and isinstance(arguments, str):
        try:
            value = json.loads(arguments)
            if "\\u" in arguments:
                text = json.dumps(value, ensure_ascii=False)
                value = json.loads(_SURROGATE.sub("\ufffd", text))
        except (ValueError, RecursionError):
            value = None
        arguments = value if isinstance(value, dict) else arguments
    elif not has_objects and not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls, or whose call's result, have ids of nine characters."""
    if isinstance(ident := message.get("tool_call_id"), str):
        message = {**message, "tool_call_id": _short(ident)}
    if isinstance(calls := message.get("tool_calls"), list):
        message = {
            **message,
            "tool_calls": [
                {**call, "id": _short(call["id"])}
                if isinstance(call, Mapping) and isinstance(call.get("id"), str)
                else call
                for call in calls
            ],
        }
    return message


def _with_kimi_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose calls have Kimi's ids, with the results of each call.

    The number counts the calls of the chat. An id that comes twice means the latest call before.
    """
    new_ids: dict[str, str] = {}
    num_calls, copies = 0, []
    for message in messages:
        copy = {**message}
        calls = copy.get("tool_calls")
        if isinstance(calls, list):
            copy["tool_calls"] = []
            for call in calls:
                function = call.get("function") if isinstance(call, Mapping) else None
                name = function.get("name") if isinstance(function, Mapping) else None
                if isinstance(name, str):
                    ident = call.get("id")
                    prefix = f"functions.{name}:"
                    new = f"{prefix}{num_calls}"
                    if isinstance(ident, str):
                        number = ident.removeprefix(prefix)
                        if ident != number and number.isascii() and number.isdigit():
                            new = ident
                        new_ids[ident] = new
                    call = {**call, "id": new}
                copy["tool_calls"].append(call)
                num_calls += 1
        if isinstance(ident := copy.get("tool_call_id"), str):
            copy["tool_call_id"] = new_ids.get(ident, ident)
        copies.append(copy)
    return copies


def _short(ident: str) -> str:
    """Return an id of nine letters and digits; the same id always becomes the same."""
    if len(ident) == 9 and ident.isascii() and ident.isalnum():
        return ident
    return hashlib.sha256(ident.encode(errors="surrogatepass")).hexdigest()[:9]
