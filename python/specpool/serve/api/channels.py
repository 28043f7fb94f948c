"""`Channels`: parts an answer in gpt-oss' form into thoughts and the rest.

Such an answer is one message after another, and each has a header before its text:
`<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.`
The prompt ends within the first header, behind `<|start|>assistant`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import regex

from specpool.engine.text.chat_messages import CHANNEL

_START, _MESSAGE, _END = "<|start|>", "<|message|>", "<|end|>"
_W = r"\s{0,64}"
_TO = r"(?P<to>to=[\w.-]{1,128})?"
_HEADER = regex.compile(
    rf"(?:<\|start\|>assistant)?{_W}{_TO}{_W}"
    rf"(?:<\|channel\|>{_W}(?P<channel>\w{{1,64}}){_W}{_TO}{_W}(?:<\|constrain\|>)?\w{{0,16}}{_W})?"
    r"<\|message\|>"
)
#: Between the texts of two messages that are output as one text.
_BETWEEN = "\n"


def has_channels(template: object) -> bool:
    """Return whether a chat template has the marks of gpt-oss' form."""
    return CHANNEL in str(template) and _MESSAGE in str(template)


@dataclass(slots=True)
class Parted:
    """A part of an answer.

    Attributes:
        thoughts: what the channel `analysis` has.
        text: anything else; headers are left out, but for those of calls.
        specials: special tokens: where each stands in the text, and its own text.
    """

    thoughts: str = ""
    text: str = ""
    specials: list[tuple[int, str]] = field(default_factory=list)


class Channels:
    """A reader of one answer. How the answer is split into parts does not change what is read.

    Only special tokens count as marks. A text without them, such as one in a given form, stays as
    it is, and so does anything that stands in the place of a header and is not one.
    """

    def __init__(self) -> None:
        """Begin within the header that the prompt has begun."""
        self._header: list[tuple[str, bool]] = []  # held pieces, each with whether it is special
        self._is_header = True
        self._is_thought = False  # in the body of a message of the channel `analysis`
        self._is_call = False  # in the body of a message to a function
        self._is_first = False  # nothing of the body has come
        self._has_thoughts = self._has_content = False
        self._new = Parted()

    def push(self, text: str, last: bool, specials: Sequence[tuple[int, str]] = ()) -> Parted:
        """Take new text, and return what is certain now.

        Args:
            text: the next text, without special tokens.
            last: no text follows.
            specials: special tokens: where each stands in the new text, and its own text.
        """
        self._new = Parted()
        start = 0
        for offset, special in specials:
            self._read_text(text[start:offset])
            self._read_special(special)
            start = offset
        self._read_text(text[start:])
        if last and self._is_header:
            is_cut = any(is_special for _, is_special in self._header)
            held = "".join(piece for piece, _ in self._header)
            if is_cut and "to=" not in held:
                self._header.clear()
            self._release()
        return self._new

    def _read_text(self, text: str) -> None:
        if not text:
            return
        if not self._is_header:
            self._output(text)
            return
        self._header.append((text, False))
        match = self._match()
        if match is None or not match.partial:
            self._release()

    def _read_special(self, special: str) -> None:
        if special == _START or (special == CHANNEL and not self._is_header):
            if self._is_header:
                self._release()
            elif self._is_call:  # its arguments end here, even if they are not whole
                self._output_special(special)
            self._header, self._is_header = [(special, True)], True
        elif not self._is_header:
            if self._is_call or special != _END:
                self._output_special(special)
            self._is_thought &= special != _END
        else:
            self._header.append((special, True))
            match = self._match()
            if match is None:
                self._release()
            elif special == _MESSAGE and not match.partial:
                self._begin(match)

    def _match(self) -> regex.Match[str] | None:
        """Match the held pieces with a header, which may go on."""
        held = "".join(piece for piece, _ in self._header)
        return _HEADER.fullmatch(held, partial=True)

    def _begin(self, header: regex.Match[str]) -> None:
        """Begin the body of a message."""
        if header["to"] is not None:
            self._release(is_call=True)
            return
        self._header, self._is_header, self._is_call = [], False, False
        self._is_thought, self._is_first = header["channel"] == "analysis", True

    def _release(self, *, is_call: bool = False) -> None:
        """Output the held pieces: the header of a call, or what is not a header."""
        header, self._header = self._header, []
        self._is_header = self._is_thought = self._is_first = False
        self._is_call = is_call
        for piece, is_special in header:
            if is_special:
                self._output_special(piece)
            else:
                self._output(piece)

    def _output(self, text: str) -> None:
        """Output a text of the message that is read."""
        has_text = self._has_thoughts if self._is_thought else self._has_content
        if self._is_first and has_text:
            text = _BETWEEN + text
        self._is_first = False
        if self._is_thought:
            self._has_thoughts = True
            self._new.thoughts += text
        else:
            self._has_content |= not self._is_call
            self._new.text += text

    def _output_special(self, special: str) -> None:
        if not self._is_thought:
            self._new.specials.append((len(self._new.text), special))
