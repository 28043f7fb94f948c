"""`Thoughts`: parts a model's thoughts from its answer, if special tokens mark them.

Such marks are not part of the text, so without them the thoughts would run into the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from specpool.serve.api.channels import Parted

#: The marks that begin thoughts, and the text that stands behind each of them.
_BEGINS = {
    "<|channel>": "thought\n",  # Gemma 4
    "[THINK]": "",  # Mistral
    "<think>": "",
    "<seed:think>": "",
    "<|START_THINKING|>": "",  # Command
    "<|inner_prefix|>": "",  # Apertus
}


def begins_thoughts(prompt: str) -> bool:
    """Return whether thoughts begin at the end of a prompt that shows its special tokens."""
    tail = prompt.rstrip()
    return any(tail.endswith((mark + label).rstrip()) for mark, label in _BEGINS.items())


class Thoughts:
    """A reader of one answer. How the answer is split into parts does not change what is read.

    Only special tokens count as marks. Thoughts end at the next special token, whichever it is: a
    model may call a function without their end.
    """

    def __init__(self, *, thinks: bool = False) -> None:
        """Begin with the answer; if `thinks`, within thoughts that the prompt has begun."""
        self._is_thought = thinks
        self._label = ""  # what must come for thoughts to begin
        self._held = ""  # the part of it that has come

    def push(self, text: str, last: bool, specials: Sequence[tuple[int, str]] = ()) -> Parted:
        """Take new text, and return what is certain now.

        Args:
            text: the next text, without special tokens.
            last: no text follows. A label that is cut off is not a text.
            specials: special tokens: where each stands in the new text, and its own text.
        """
        new, start = Parted(), 0
        for offset, special in specials:
            self._read(text[start:offset], new)
            new.text += self._held
            label = _BEGINS.get(special)
            self._is_thought = label == ""
            self._label, self._held = label or "", ""
            if label is None:
                new.specials.append((len(new.text), special))
            start = offset
        self._read(text[start:], new)
        return new

    def _read(self, text: str, new: Parted) -> None:
        """Take a text without special tokens."""
        if self._label:
            self._held += text
            if self._held != self._label and self._label.startswith(self._held):
                return
            self._is_thought = self._held.startswith(self._label)
            text = self._held.removeprefix(self._label)
            self._label = self._held = ""
        if self._is_thought:
            new.thoughts += text
        else:
            new.text += text
