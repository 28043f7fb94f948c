"""`grammar_of`: the form that a request wants its text in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specpool.checks import shown
from specpool.engine.text.structured.grammar import Grammar
from specpool.errors import ConfigError
from specpool.serve.api.errors import ApiError, bad
from specpool.serve.api.requests import MAX_TOOLS, ChatRequest, GenerationBody, Tool

_KINDS = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "json_object": "json_object",
}
#: Other engines' fields for a form, and what each has.
_FIELDS = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
    "guided_json_object": "json_object",
}
#: Options of `structured_outputs` that say how a form is compiled, or what is done anyway.
_OPTIONS = {"disable_any_whitespace", "disable_fallback"}
#: Keywords of a JSON Schema that say of which type a value is, or may.
_TYPED = {"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"}


def grammar_of(request: GenerationBody) -> Grammar | None:
    """Return the form of the text, which several fields or a forced tool can give; None means any.

    Raises:
        ApiError: they do not have OpenAI's form, or several of them are given.
    """
    forms = _forms(request)
    if len(forms) > 1:
        names = " and ".join(name for name, *_ in forms)
        raise bad(f"{names} both say what the text must be: give one", forms[1][0])
    if not forms:
        return None
    name, kind, content = forms[0]
    try:
        make: Callable[..., Grammar] = getattr(Grammar, kind)
        return make() if kind == "json_object" else make(content)
    except ConfigError as error:
        raise bad(str(error), name) from None


def form_field(request: GenerationBody) -> str | None:
    """Return the field that says what the text must be; None if there is none."""
    return next((name for name, *_ in _forms(request)), None)


def _forms(request: GenerationBody) -> list[tuple[str, str, Any]]:
    fields = [(name, kind, getattr(request, name)) for name, kind in _FIELDS.items()]
    forms = [field for field in fields if _is_given(field[1], field[2])]
    return forms + [
        (name, *part)
        for name, part in (
            ("response_format", _of_format(request.response_format)),
            ("structured_outputs", _of_outputs(request.structured_outputs)),
            ("tool_choice", _of_tools(request)),
        )
        if part is not None
    ]


def _is_given(kind: str, content: Any) -> bool:
    """Return whether a field asks for a form: False is a JSON schema, and means "off" elsewhere."""
    return content is not None and (content is not False or kind == "json_schema")


def _of_format(response_format: dict[str, Any] | None) -> tuple[str, Any] | None:
    if not response_format or response_format.get("type") == "text":
        return None
    kind = response_format.get("type")
    if kind == "json_object" and response_format.get("schema") is None:
        return kind, None
    if kind in ("json_object", "json_schema"):
        # llama.cpp's and Together's clients send a schema beside `json_object`.
        path = "response_format" + ".json_schema" * (kind == "json_schema")
        held = response_format.get("json_schema") if kind == "json_schema" else response_format
        schema = held.get("schema") if isinstance(held, dict) else None
        if not isinstance(schema, dict | bool):
            raise bad(f"{path}.schema must be a JSON schema", "response_format")
        if kind == "json_object" and schema is True:
            schema = {}
        if kind == "json_object" and isinstance(schema, dict) and not _TYPED & schema.keys():
            schema = {"type": "object"} | schema
        return "json_schema", schema
    raise bad(
        f"response_format.type must be text, json_object or json_schema, got {kind!r:.40}",
        "response_format",
    )


def _of_outputs(structured_outputs: dict[str, Any] | None) -> tuple[str, Any] | None:
    held = {
        name: value
        for name, value in (structured_outputs or {}).items()
        if name not in _OPTIONS and _is_given(_KINDS.get(name, ""), value)
    }
    if not held:
        return None
    if len(held) > 1 or not held.keys() <= _KINDS.keys():
        raise bad(
            f"structured_outputs has one of {', '.join(_KINDS)}, got {', '.join(held)[:100]}",
            "structured_outputs",
        )
    ((name, value),) = held.items()
    if name in ("regex", "grammar") and not isinstance(value, str):
        raise bad(f"structured_outputs.{name} must be a string", "structured_outputs")
    if name == "choice" and not (isinstance(value, list) and all(type(v) is str for v in value)):
        raise bad("structured_outputs.choice must be a list of strings", "structured_outputs")
    return _KINDS[name], value


def _of_tools(request: GenerationBody) -> tuple[str, Any] | None:
    """Return the schema of the call that `tool_choice` forces."""
    if not isinstance(request, ChatRequest):
        return None
    forced = forced_tool(request)
    if forced is not None:
        return "json_schema", _parameters(forced)
    if not wants_call(request):
        return None
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                # With an id of its own, `#` within the parameters means the parameters.
                "arguments": {"$id": f"urn:specpool:tool:{number}", **_parameters(tool)},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools_of(request))
    ]
    return "json_schema", calls[0] if len(calls) == 1 else {"anyOf": calls}


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}


def tools_of(request: ChatRequest) -> list[Tool]:
    """Return the tools that the model may call.

    Raises:
        ApiError: `tool_choice` has another form, or names no tool of the request.
    """
    tools, choice = request.tools or [], request.tool_choice
    if choice is None or choice == "auto":
        return tools
    if choice == "none":
        return []
    if choice != "required" and not isinstance(choice, dict):
        raise _no_choice(
            f"tool_choice must be none, auto, required or a function, got {shown(choice)}"
        )
    if not tools:
        raise _no_choice("tool_choice asks for a call, but there are no tools")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        _, allowed = _allowed(choice)
        tools_by_name = _by_name(tools)
        names = {_named(entry, tools_by_name).function.name for entry in allowed}
        return [tool for tool in tools if tool.function.name in names]
    return tools


def forced_tool(request: ChatRequest) -> Tool | None:
    """Return the one tool that must be called; None if there is no such tool.

    Raises:
        ApiError: see `tools_of`.
    """
    tools, choice = tools_of(request), request.tool_choice
    if not isinstance(choice, dict) or choice.get("type") == "allowed_tools":
        return None
    return _named(choice, _by_name(tools))


def wants_call(request: ChatRequest) -> bool:
    """Return whether the answer must be a call of any of the tools.

    Raises:
        ApiError: see `tools_of`.
    """
    choice = request.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(choice)[0] == "required"
    return choice == "required"


def _allowed(choice: dict[str, Any]) -> tuple[str, list[Any]]:
    """Return the mode and the tools of a `tool_choice` of the type `allowed_tools`."""
    allowed = choice.get("allowed_tools")
    mode = allowed.get("mode") if isinstance(allowed, dict) else None
    tools = allowed.get("tools") if isinstance(allowed, dict) else None
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise _no_choice(
            "tool_choice.allowed_tools must have the mode auto or required, and a list of tools, "
            f"got {shown(allowed)}"
        )
    if len(tools) > MAX_TOOLS:
        raise _no_choice(f"tool_choice allows at most {MAX_TOOLS} tools, got {len(tools)}")
    return mode, tools


def _by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Return tools by their names; of several with one name the first."""
    return {tool.function.name: tool for tool in reversed(tools)}


def _named(choice: Any, tools: Mapping[str, Tool]) -> Tool:
    """Return the tool that a choice names, as `{"type": "function", "function": {"name": ..}}`."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if isinstance(name, str) and name in tools and choice.get("type") == "function":
        return tools[name]
    raise _no_choice(f"tool_choice names no function of the request: {shown(name)}")


def _no_choice(message: str) -> ApiError:
    return bad(message, "tool_choice")
