"""`ToolCalls`: finds the calls of functions in a model's text, as it comes."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from typing import Any

from specpool.serve.api.requests import ChatRequest
from specpool.serve.api.structured import forced_tool, tools_of

#: What models write before calls: Hermes and Qwen; Mistral; Llama 3; Granite.
MARKERS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<|tool_call|>")
_CLOSE = "</tool_call>"
#: The begin of a call whose arguments are an object, up to them.
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([\w-]+)"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
#: Mistral's newer form: a name, and then its arguments.
_NAMED = re.compile(r"([\w-]{1,64})(?:\[CALL_ID\]\w{1,32})?\[ARGS\](?=\{)")
_NAMED_LEN = 160


def markers_of(template: object) -> tuple[str, ...]:
    """Return the markers that a chat template speaks of; all of them if it speaks of none."""
    found = tuple(marker for marker in MARKERS if marker in str(template or ""))
    return found or MARKERS


class JsonEnd:
    """Finds the end of a JSON object or list that comes in parts."""

    def __init__(self, depth: int = 0) -> None:
        """Begin `depth` brackets deep."""
        self._depth, self._is_quoted, self._is_escaped = depth, False, False

    def find(self, text: str) -> int | None:
        """Look at the next part; return the index behind the last bracket, None = not yet."""
        for index, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_quoted:
                self._is_escaped, self._is_quoted = char == "\\", char != '"'
            elif char == '"':
                self._is_quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return None


class ToolCalls:
    """A reader of one answer. It splits the text into content and calls.

    A forced function's whole text is its arguments. Otherwise a call is `{"name": ..,
    "arguments": ..}`, alone or behind a marker, also several of them in a list. Its arguments are
    told as they come, once its name is known to be one of the request's. All else is content.
    """

    def __init__(self, request: ChatRequest, markers: tuple[str, ...] = MARKERS) -> None:
        """Read an answer to this request, of a model that marks its calls by `markers`."""
        forced = forced_tool(request)
        self._names = {tool.function.name for tool in tools_of(request)}
        self._forced = None if forced is None else forced.function.name
        self._markers = markers
        self._held = self._raw = ""  # not decided yet; and what stood before it, also not
        self._marker = ""  # of the call that is read
        self._is_begin = True  # nothing but blanks has come
        self._is_fresh = False  # nothing but blanks has come since a call
        self._json, self._num_seen = JsonEnd(), 0
        self._is_wrapped = False  # the arguments are within the call's object
        self._state: Callable[[bool], bool] = self._text
        self._content = ""
        self._deltas: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []

    def push(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Take new text; return content and deltas of calls that are certain now."""
        if self._forced is None and not self._names:
            return text, []
        self._content, self._deltas = "", []
        if self._forced is not None:
            if not self.calls:
                self._begin(self._forced)
            self._argue(text)
            return "", self._deltas
        self._held += text
        while self._state(last):
            pass
        return self._content, self._deltas

    @property
    def finish_reason(self) -> str:
        """The reason for an end by a stop."""
        return "tool_calls" if self.calls and self._forced is None else "stop"

    # --- the states: each takes what it can from `_held`; True = another may go on

    def _text(self, last: bool) -> bool:
        """Read content, up to a marker; a bracket at the begin may be a call without one."""
        begin = self._held.lstrip() if self._is_begin else ""
        if begin[:1] in ("{", "[") and not begin.startswith(self._markers):
            if not last and any(marker.startswith(begin) for marker in self._markers):
                return False
            self._marker, self._is_begin, self._state = "", False, self._item
            return True
        found = [(at, m) for m in self._markers if (at := self._held.find(m)) >= 0]
        if found:
            at, self._marker = min(found)
            end = at + len(self._marker)
            content = self._held[:at].rstrip()
            self._content += content
            self._raw, self._held = self._held[len(content) : end], self._held[end:]
            self._is_begin, self._state = False, self._item
            return True
        kept = len(self._held) if last else self._num_certain()
        is_blank = not self._held[:kept].strip()
        self._is_begin &= is_blank
        self._is_fresh &= is_blank
        if not is_blank or (last and not self._is_fresh):
            self._content += self._held[:kept]
            self._held = self._held[kept:]
        return False

    def _item(self, last: bool) -> bool:
        """Read what stands before a call: blanks, a list's bracket, a name."""
        lead = re.match(r"[\s,;\[]*", self._held)
        assert lead is not None
        rest = self._held[lead.end() :]
        if not rest and not last:
            return False
        if rest.startswith("{"):
            self._raw, self._held = self._raw + lead[0], rest
            self._json, self._num_seen, self._state = JsonEnd(), 0, self._call
            return True
        if self._marker == "[TOOL_CALLS]" and not lead[0].strip():
            named = _NAMED.match(rest)
            if named is not None and named[1] in self._names:
                self._held, self._is_wrapped = rest[named.end() :], False
                self._start(named[1])
                return True
            if not last and named is None and len(rest) < _NAMED_LEN:
                return False
        return self._give_up(0)

    def _call(self, last: bool) -> bool:
        """Read a call's object, up to its arguments, or all of it."""
        head = _HEAD.match(self._held)
        if head is not None and head[1] in self._names:
            self._held, self._is_wrapped = self._held[head.end() :], True
            self._start(head[1])
            return True
        end = self._json.find(self._held[self._num_seen :])
        if end is None:
            self._num_seen = len(self._held)
            return self._give_up(len(self._held)) if last else False
        end += self._num_seen
        call = self._parsed(self._held[:end])
        if call is None:
            return self._give_up(end)
        self._held, self._raw = self._held[end:], ""
        self._begin(call["name"])
        self._argue(call["arguments"])
        self._state = self._after
        return True

    def _arguments(self, last: bool) -> bool:
        """Tell the arguments as they come."""
        end = self._json.find(self._held)
        self._argue(self._held[:end])
        self._held = "" if end is None else self._held[end:]
        if end is None:
            return False
        self._json = JsonEnd(1)
        self._state = self._rest if self._is_wrapped else self._after
        return True

    def _rest(self, last: bool) -> bool:
        """Leave out what the call's object has behind the arguments."""
        end = self._json.find(self._held)
        self._held = "" if end is None else self._held[end:]
        self._state = self._rest if end is None else self._after
        return end is not None

    def _after(self, last: bool) -> bool:
        """Find the end of the calls, or a further one."""
        rest = self._held.lstrip()
        if self._marker == "<tool_call>":
            if not last and len(rest) < len(_CLOSE) and _CLOSE.startswith(rest):
                return False
            if rest.startswith(_CLOSE):
                self._held = rest.removeprefix(_CLOSE)
            self._is_fresh, self._state = True, self._text
            return True
        more = rest.lstrip(",; \t\r\n")
        if not more and not last:
            return False
        if more.startswith("{"):
            self._held, self._state = more, self._item
            return True
        if rest.startswith("]"):
            self._held = rest.removeprefix("]")
        self._is_fresh, self._state = True, self._text
        return True

    # --- what the states share

    def _num_certain(self) -> int:
        """Return how much of the held text is content, whatever follows."""
        held = self._held
        for marker in self._markers:
            sizes = range(min(len(marker) - 1, len(held)), 0, -1)
            size = next((n for n in sizes if self._held.endswith(marker[:n])), 0)
            held = min(held, self._held[: len(self._held) - size], key=len)
        return len(held.rstrip())

    def _give_up(self, num: int) -> bool:
        """Take back a call: it and `num` held characters are content."""
        self._content += self._raw + self._held[:num]
        self._raw, self._held, self._state = "", self._held[num:], self._text
        self._is_fresh = False
        return bool(self._held)

    def _start(self, name: str) -> None:
        self._raw, self._json, self._state = "", JsonEnd(), self._arguments
        self._begin(name)

    def _begin(self, name: str) -> None:
        """Tell a new call."""
        call = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
        self._deltas.append(
            {"index": len(self.calls), **call, "function": {"name": name, "arguments": ""}}
        )
        self.calls.append({**call, "function": {"name": name, "arguments": ""}})

    def _argue(self, text: str) -> None:
        """Tell more arguments of the latest call."""
        index = len(self.calls) - 1
        self.calls[index]["function"]["arguments"] += text
        if self._deltas and self._deltas[-1]["index"] == index:
            self._deltas[-1]["function"]["arguments"] += text
        elif text:
            self._deltas.append({"index": index, "function": {"arguments": text}})

    def _parsed(self, text: str) -> dict[str, str] | None:
        """Parse a call; None = it is none, or of a function that the request has not."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if isinstance(found, dict) and isinstance(found.get("function"), dict):
            found = found["function"]
        if not isinstance(found, dict) or found.get("name") not in self._names:
            return None
        arguments = found.get("arguments", found.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        return {"name": str(found["name"]), "arguments": arguments}
