"""`ToolCalls`: finds the calls of functions in a model's text, as it comes."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from specpool.serve.api.requests import ChatRequest
from specpool.serve.api.structured import forced_tool, form_field, tools_of, wants_call
from specpool.serve.api.tool_formats import (
    FORMATS,
    OBJECT_HEAD,
    OBJECT_REST,
    THOUGHTS_BEGIN,
    THOUGHTS_END,
    Format,
)
from specpool.serve.api.tool_values import json_of_gemma, json_of_keywords, json_of_tag, types_of

if TYPE_CHECKING:
    import regex


class JsonEnd:
    """Finds the end of a JSON object or list, or of a Python call, that comes in parts.

    Attributes:
        is_broken: the end that was found stands before a tag or a special token, outside of
            strings: brackets before it are missing.
    """

    def __init__(self, depth: int = 0, *, is_python: bool = False) -> None:
        """Begin `depth` brackets deep."""
        self.is_broken = False
        self._depth, self._is_escaped = depth, False
        self._quote = ""  # what ends the string; "" outside of strings
        self._num_quotes = 0  # quotes at the end of what the string has so far
        self._is_begin = False  # nothing of the string has come
        self._empty = ""  # the quote of an empty string of Python's that has just ended
        self._is_python = is_python
        self._quotes, self._opens, self._closes = "\"'" if is_python else '"', "{[", "}]"
        if is_python:
            self._opens, self._closes = "{[(", "}])"

    def find(self, text: str, shown: bytearray) -> int | None:
        """Look at the next part; return the index behind the last bracket, or None before it.

        Args:
            text: the next part.
            shown: for each of its characters, 0 if it belongs to a special token.
        """
        for index, char in enumerate(text):
            if self._quote:
                self._read_string(char)
                continue
            empty, self._empty = self._empty, ""
            if char == "<" or not shown[index]:
                self.is_broken = True
                return index
            if char in self._quotes:
                self._quote = char * 3 if char == empty else char
                self._num_quotes, self._is_begin = 0, True
            elif char in self._opens:
                self._depth += 1
            elif char in self._closes:
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return None

    def _read_string(self, char: str) -> None:
        """Take the next character of a string."""
        is_quote = char == self._quote[0] and not self._is_escaped
        self._is_escaped = char == "\\" and not self._is_escaped
        self._num_quotes = self._num_quotes + 1 if is_quote else 0
        if self._num_quotes == len(self._quote):
            self._empty = char if self._is_begin and self._is_python else ""
            self._quote = ""
        self._is_begin = False


class ToolCalls:
    """A reader of one answer. It splits the text into content and calls.

    A forced function's whole text is its arguments. If any function must be called, no text is
    content. Otherwise calls are read in the formats of `tool_formats`, anywhere in the text; those
    without a mark only at its begin or behind thoughts.
    A call within thoughts is content, unless the thoughts never end.
    A call's arguments are output as they come, once its name is known to be one of the request's.
    Everything else is content. Special tokens are read, but are not part of any output.
    """

    def __init__(
        self, request: ChatRequest, formats: Sequence[Format] = FORMATS, *, thinks: bool = False
    ) -> None:
        """Read an answer to this request.

        Args:
            request: the request.
            formats: how the model writes its calls.
            thinks: the text begins within the model's thoughts.
        """
        forced = forced_tool(request)
        # A text in a form of the request's is content, even if it looks like a call.
        is_content = form_field(request) not in (None, "tool_choice")
        tools = [] if is_content else tools_of(request)
        self._schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
        self._wants_call = wants_call(request)
        self._forced = None if forced is None else forced.function.name
        self._formats, self._format = formats, FORMATS[0]  # the latter: of the call that is read
        self._held = ""  # not decided yet
        self._shown = bytearray()  # a byte for each held character; 0 if of a special token
        self._num_searched = 0  # held characters that need not be searched again
        self._body_start = 0  # where the object or the arguments of the call begin in the held text
        self._is_begin = True  # nothing but blanks has come, or nothing else behind thoughts
        self._is_fresh = False  # nothing but blanks has come since a call
        self._thinks = thinks and not self._wants_call  # the text is within thoughts
        self._end, self._num_fed = JsonEnd(), 0
        self._is_wrapped = False  # the arguments are within the call's object
        self._num_whole: int | None = None  # calls before the first one that lacks brackets
        self._name = ""  # of the function that is called
        self._ident: str | None = None  # of the call, if the model has given one
        self._num_args = 0  # in tags, of the call that is read
        self._types = frozenset[str]()  # of the argument that is read
        self._state: Callable[[bool], bool] = self._text
        self._content = ""
        self._deltas: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []

    def push(
        self, text: str, last: bool, specials: Sequence[tuple[int, str]] = ()
    ) -> tuple[str, list[dict[str, Any]]]:
        """Take new text; return content and deltas of calls that are certain now.

        Args:
            text: the next text, without special tokens.
            last: no text follows.
            specials: special tokens: where each stands in the new text, and its own text.
        """
        if self._forced is None and not self._schemas:
            return text, []
        self._content, self._deltas = "", []
        if self._forced is not None:
            if not self.calls:
                self._begin(self._forced)
            self._argue(text)
            return "", self._deltas
        start = 0
        for position, special in (*specials, (len(text), "")):
            self._held += text[start:position] + special
            self._shown += b"\1" * (position - start) + b"\0" * len(special)
            start = position
        while self._state(last):
            pass
        # If the answer must be a call, a text that ends before the call's name is a part of a call.
        return "" if self._wants_call else self._content, self._deltas

    @property
    def finish_reason(self) -> str:
        """The reason for an end by a stop; a call whose arguments it has cut off was not made."""
        is_whole = self.num_whole == len(self.calls) > 0
        return "tool_calls" if is_whole and self._forced is None else "stop"

    @property
    def num_whole(self) -> int:
        """The number of calls before the first one whose arguments are not whole."""
        if self._num_whole is not None:
            return self._num_whole
        is_cut = self._state in (self._arguments, self._key, self._value)
        return len(self.calls) - is_cut

    # --- the states: each reads from the held text, and returns whether the next state may go on

    def _text(self, last: bool) -> bool:
        """Read content, up to a call or to the end of thoughts."""
        held = self._held
        starts = [(m, form) for form in self._formats if (m := self._find(form, last)) is not None]
        thoughts = THOUGHTS_END.search(held, self._num_searched, partial=not last)
        places = [m.start() for m, _ in starts] + ([thoughts.start()] if thoughts else [])
        if self._is_begin and not self._thinks:
            begin = THOUGHTS_BEGIN.match(held, len(held) - len(held.lstrip()), partial=not last)
            self._thinks = begin is not None and not begin.partial
            places += [begin.start()] if begin is not None and begin.partial else []
        certain = min([*places, len(held)])
        whole = [pair for pair in starts if pair[0].start() == certain and not pair[0].partial]
        if whole:
            match, self._format = whole[0]
            content_len = len(held[:certain].rstrip())
            self._content += self._cut(content_len)
            self._is_begin = self._is_fresh = False
            if self._thinks:
                self._num_fed, self._state = 0, self._thought
                return True
            self._enter(match, match.end() - content_len)
            return True
        if thoughts and not thoughts.partial and thoughts.start() == certain:
            self._end_thoughts(thoughts.end())
            return True
        self._num_searched = certain
        num = len(held) if last else len(held[:certain].rstrip())
        is_blank = not held[:num].strip()
        self._is_begin &= is_blank
        self._is_fresh &= is_blank
        if not is_blank or (last and not self._is_fresh):
            self._content += self._cut(num)
        return False

    def _thought(self, last: bool) -> bool:
        """Hold back a call within thoughts: it is content if they end, else it is one."""
        end = THOUGHTS_END.search(self._held, self._num_fed, partial=not last)
        is_whole = end is not None and not end.partial
        if end is not None and is_whole:
            self._end_thoughts(end.end())
        self._num_fed = len(self._held) if end is None else end.start()
        if not is_whole and not last:
            return False
        self._thinks, self._num_searched, self._state = False, 0, self._text
        return True

    def _end_thoughts(self, num: int) -> None:
        """Output thoughts, up to their end behind `num` held characters."""
        self._content += self._cut(num)
        self._thinks, self._is_begin, self._is_fresh = False, True, False

    def _call(self, last: bool) -> bool:
        """Read a call's object, up to its arguments, or all of it."""
        head = OBJECT_HEAD.match(self._held, self._body_start)
        if head is not None and head["name"] in self._schemas:
            self._is_wrapped = True
            self._start(head["name"], head.end())
            return True
        end = self._end.find(self._held[self._num_fed :], self._shown[self._num_fed :])
        if end is None:
            self._num_fed = len(self._held)
            return last and self._give_up(len(self._held))
        end += self._num_fed
        if self._end.is_broken:
            return self._give_up(end)
        return self._whole(*self._parsed(self._held[self._body_start : end]), end)

    def _keywords(self, last: bool) -> bool:
        """Read a Python call."""
        end = self._end.find(self._held[self._num_fed :], self._shown[self._num_fed :])
        if end is None:
            self._num_fed = len(self._held)
            return last and self._give_up(len(self._held))
        end += self._num_fed
        if self._end.is_broken:
            return self._give_up(end)
        return self._whole(
            self._name, json_of_keywords(self._held[self._body_start : end - 1]), end
        )

    def _gemma(self, last: bool) -> bool:
        """Read one of Gemma's objects, up to the mark behind it."""
        end = self._format.last.search(self._held, self._num_fed, partial=not last)
        if not last and (end is None or end.partial):
            self._num_fed = len(self._held) if end is None else end.start()
            return False
        start, stop = end.span() if end else (len(self._held),) * 2
        return self._whole(self._name, json_of_gemma(self._held[self._body_start : start]), stop)

    def _arguments(self, last: bool) -> bool:
        """Output the arguments as they come."""
        end = self._end.find(self._held, self._shown)
        self._argue(self._cut(len(self._held) if end is None else end))
        if end is None:
            return False
        if self._end.is_broken:
            self._num_whole = self.num_whole
        self._state = self._skip_object_end if self._is_wrapped else self._between_calls
        return True

    def _skip_object_end(self, last: bool) -> bool:
        """Leave out what the call's object has behind the arguments.

        Anything but its further members and its brace ends the call: the brace is missing.
        """
        rest = OBJECT_REST.match(self._held, partial=True)
        if rest is not None and rest.partial:
            if last:  # the text was cut within the object
                self._cut(len(self._held))
            return False
        if rest is None:
            self._state = self._between_calls
            return True
        self._cut(rest.end())
        if rest["nested"] is not None:
            self._end, self._state = JsonEnd(), self._skip_nested
        elif rest["end"]:
            self._state = self._between_calls
        return True

    def _skip_nested(self, last: bool) -> bool:
        """Leave out an object or a list behind the arguments."""
        end = self._end.find(self._held, self._shown)
        self._cut(len(self._held) if end is None else end)
        self._state = self._skip_nested if end is None else self._skip_object_end
        return end is not None

    def _key(self, last: bool) -> bool:
        """Read the tag of the next argument; any other text ends the arguments."""
        key = self._format.key_pattern.match(self._held, partial=True)
        if key is None:
            self._argue("}" if self._num_args else "{}")
            self._state = self._between_calls
            return True
        if key.partial:
            if last:  # the text was cut within a tag
                self._cut(len(self._held))
            return False
        self._cut(key.end())
        parameters = self._schemas[self._name]
        properties = parameters.get("properties")
        schema = properties.get(key["key"]) if isinstance(properties, dict) else None
        self._types = types_of(schema, parameters)
        self._argue(f"{', ' if self._num_args else '{'}{json.dumps(key['key'])}: ")
        self._argue('"' if self._types == {"string"} else "")
        self._num_args, self._num_searched, self._state = self._num_args + 1, 0, self._value
        return True

    def _value(self, last: bool) -> bool:
        """Read an argument's value: a string is output as it comes, anything else as a whole."""
        end = self._format.value_end_pattern.search(self._held, self._num_searched, partial=True)
        is_whole = end is not None and not end.partial
        self._num_searched = len(self._held) if end is None else end.start()
        if self._types == {"string"}:
            text = json.dumps(self._cut(self._num_searched))[1:-1]
            self._argue(text + '"' if is_whole else text)
        elif is_whole:
            self._argue(json_of_tag(self._cut(self._num_searched), self._types))
        if end is not None and is_whole:
            self._cut(len(end.group()))
            self._state = self._key
        return is_whole

    def _between_calls(self, last: bool) -> bool:
        """Find the next call of the same kind, or the end of the calls."""
        if self._format.next is not None:
            match = self._format.next.match(self._held, partial=not last)
            if match is not None and match.partial:
                return False
            if match is not None and self._is_known(match):
                self._enter(match, match.end())
                return True
        closing = self._format.last.fullmatch(self._held, partial=True)
        if closing is not None and not last:
            return False
        # A text that was cut off within the closing mark ends there.
        end = closing or self._format.last.match(self._held)
        self._cut(0 if end is None else end.end())
        self._is_fresh, self._num_searched, self._state = True, 0, self._text
        return True

    # --- what the states share

    def _find(self, form: Format, last: bool) -> regex.Match[str] | None:
        """Find the first place where a call of a format begins, or may begin with more text."""
        held, partial = self._held, not last
        if not form.marks:
            if not self._is_begin:
                return None
            blanks = len(held) - len(held.lstrip())
            match = form.first.match(held, blanks, partial=partial)
            return match if match and match.start() < len(held) and self._is_known(match) else None
        start = self._num_searched
        while match := form.first.search(held, start, partial=partial):
            if match.start() == len(held):
                break
            if self._is_known(match):
                return match
            start = match.start() + 1
        return None

    def _is_known(self, match: regex.Match[str]) -> bool:
        """Return whether a call's name is one of the request's, or has not come yet."""
        name = match.groupdict().get("name")
        return match.partial or name is None or name in self._schemas

    def _enter(self, match: regex.Match[str], start: int) -> None:
        """Begin to read a call of the current format.

        Its object or its arguments begin at `start`.
        """
        self._body_start = self._num_fed = start
        self._name = match.groupdict().get("name") or ""
        self._ident = match.groupdict().get("id")
        kind = self._format.kind
        if kind == "object":
            self._end, self._state = JsonEnd(), self._call
        elif kind == "python":
            self._end, self._state = JsonEnd(1, is_python=True), self._keywords
        elif kind == "gemma":
            self._state = self._gemma
        else:
            self._is_wrapped = False
            self._start(self._name, start)
            if kind == "tags":
                self._num_args, self._state = 0, self._key

    def _start(self, name: str, num: int) -> None:
        """Output a call's begin, and leave out the `num` characters of it."""
        self._cut(num)
        self._begin(name)
        self._end, self._state = JsonEnd(), self._arguments

    def _whole(self, name: str, arguments: str | None, num: int) -> bool:
        """Output a call that was read as a whole, in `num` characters, or give it up."""
        if arguments is None:
            return self._give_up(num)
        self._cut(num)
        self._begin(name)
        self._argue(arguments)
        self._state = self._between_calls
        return True

    def _give_up(self, num: int) -> bool:
        """Take back a call: `num` held characters are content."""
        self._content += self._cut(num)
        self._num_searched, self._state = 0, self._text
        self._is_fresh = False
        return bool(self._held)

    def _cut(self, num: int) -> str:
        """Remove the first held characters; return those that are not of special tokens."""
        cut = "".join(itertools.compress(self._held[:num], self._shown))
        self._held = self._held[num:]
        del self._shown[:num]
        self._num_searched = max(0, self._num_searched - num)
        return cut

    def _begin(self, name: str) -> None:
        """Output a new call."""
        ident = self._ident
        if ident is None or any(call["id"] == ident for call in self.calls):
            ident = f"call_{secrets.token_hex(12)}"
        call = {"id": ident, "type": "function"}
        self._deltas.append(
            {"index": len(self.calls), **call, "function": {"name": name, "arguments": ""}}
        )
        self.calls.append({**call, "function": {"name": name, "arguments": ""}})

    def _argue(self, text: str) -> None:
        """Output more arguments of the latest call."""
        index = len(self.calls) - 1
        self.calls[index]["function"]["arguments"] += text
        if self._deltas and self._deltas[-1]["index"] == index:
            self._deltas[-1]["function"]["arguments"] += text
        elif text:
            self._deltas.append({"index": index, "function": {"arguments": text}})

    def _parsed(self, text: str) -> tuple[str, str | None]:
        """Return a call's name and its arguments; None if it is not a call that may be made."""
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return "", None
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            call = call["function"]
        if not isinstance(call, dict):
            return "", None
        name = call.get("name", call.get("tool_name"))
        if not isinstance(name, str) or name not in self._schemas:
            return "", None
        arguments = call.get("arguments", call.get("parameters"))
        if not isinstance(arguments, str):
            arguments = json.dumps({} if arguments is None else arguments)
        return name, arguments
