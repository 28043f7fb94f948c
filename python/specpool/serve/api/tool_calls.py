"""`ToolCalls`: finds the calls of functions in a model's text."""

from __future__ import annotations

import json
import secrets
from typing import Any

from specpool.serve.api.requests import ChatRequest
from specpool.serve.api.structured import forced_tool, tools_of

#: How most models mark a call within a text.
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class ToolCalls:
    """A reader of one answer. It splits the text into content and calls.

    A forced function's whole text is its arguments. Otherwise a call is `{"name": ..,
    "arguments": ..}`, alone or between `<tool_call>` tags; such text is held until its end.
    """

    def __init__(self, request: ChatRequest) -> None:
        """Read an answer to this request."""
        forced = forced_tool(request)
        self._names = {tool.function.name for tool in tools_of(request)}
        self._forced = None if forced is None else forced.function.name
        self._is_required = request.tool_choice == "required"
        self._held = ""
        self._holds = self._is_required
        self.calls: list[dict[str, Any]] = []

    def push(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Take new text; return content and deltas of calls that are certain now."""
        if self._forced is not None:
            return "", self._of_forced(text)
        if not self._names:
            return text, []
        self._held += text
        if not last and (self._holds or self._may_be_call()):
            return "", []
        held, self._held = self._held, ""
        if not last:
            return held, []
        content, calls = self._parsed(held)
        for call in calls:
            self._add(call["name"], call["arguments"])
        return content, [{"index": i, **call} for i, call in enumerate(self.calls)]

    @property
    def finish_reason(self) -> str:
        """The reason for an end by a stop."""
        return "tool_calls" if self.calls and self._forced is None else "stop"

    def _of_forced(self, text: str) -> list[dict[str, Any]]:
        """Return the delta of a forced call, whose arguments the text goes on with."""
        if not self.calls and self._forced is not None:
            self._add(self._forced, "")
            self.calls[0]["function"]["arguments"] = text
            head = {k: v for k, v in self.calls[0].items() if k != "function"}
            return [{"index": 0, **head, "function": {"name": self._forced, "arguments": text}}]
        self.calls[0]["function"]["arguments"] += text
        return [{"index": 0, "function": {"arguments": text}}] if text else []

    def _add(self, name: str, arguments: str) -> None:
        function = {"name": name, "arguments": arguments}
        ident = f"call_{secrets.token_hex(12)}"
        self.calls.append({"id": ident, "type": "function", "function": function})

    def _may_be_call(self) -> bool:
        """Return whether the held text is the beginning of a call, or may become one."""
        text = self._held.lstrip()
        if text.startswith("{") or _OPEN in self._held:
            self._holds = True
            return True
        return not text or any(self._held.endswith(_OPEN[:n]) for n in range(1, len(_OPEN)))

    def _parsed(self, text: str) -> tuple[str, list[dict[str, str]]]:
        """Split a whole text into content and calls; what is no call is content."""
        content, *parts = text.split(_OPEN)
        calls = [self._call(part.split(_CLOSE)[0]) for part in parts]
        if not parts:
            content, calls = "", [self._call(text)]
        if any(call is None for call in calls):
            return text, []
        return content.strip() if parts else "", [call for call in calls if call is not None]

    def _call(self, text: str) -> dict[str, str] | None:
        """Parse a call; None = it is none, or of a function that the request has not."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or found.get("name") not in self._names:
            return None
        arguments = found.get("arguments", found.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        return {"name": str(found["name"]), "arguments": arguments}
