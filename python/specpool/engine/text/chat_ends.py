"""`chat_ends`: the tokens that end an answer of a chat, as the chat template writes them.

A base model's configs often name `<|endoftext|>` alone, while its chat template ends every turn
with another token. Without that one an answer would run into the next turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from specpool.engine.text.chat_messages import (
    PROBE_CALLED,
    PROBE_CONTENT,
    PROBE_FUNCTION,
    PROBE_USER,
)
from specpool.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Renders messages with these variables of the template; raises `ConfigError`.
Render = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], str]

_SAID = {"role": "assistant", "content": PROBE_CONTENT}
_CALLED_TWICE = PROBE_CALLED | {"tool_calls": [*PROBE_CALLED["tool_calls"]] * 2}


def chat_ends(tokenizer: PreTrainedTokenizerBase, render: Render) -> dict[int, str]:
    """Return the tokens that end an answer of a chat, with their names.

    They are the tokenizer's end-of-sequence token, and the added token behind an answer, or behind
    a call of a function, at the end of a rendered chat. If another added token stands behind an
    answer both at the end of a chat and within it, that one ends answers too: Phi's templates end a
    turn with it, and a whole chat with the end-of-sequence token. If the template writes nothing
    behind an answer, the special token that begins the next turn ends it. A template may begin the
    next answer behind every chat, as Command's do: that is left out. A template that refuses such a
    chat adds no token.

    Args:
        tokenizer: the target's.
        render: renders a chat with the tokenizer's template.
    """
    added = {str(token.content): (i, token.special) for i, token in _added(tokenizer).items()}
    ends: dict[int, str] = {}
    if isinstance(eos := getattr(tokenizer, "eos_token_id", None), int):
        ends[eos] = str(tokenizer.eos_token)

    def rendered(messages: Sequence[Mapping[str, Any]], **variables: Any) -> str | None:
        """Return a chat as text; None if the template refuses it."""
        try:
            return render(messages, {"add_generation_prompt": False, **variables})
        except ConfigError:
            return None

    def tail(messages: Sequence[Mapping[str, Any]], mark: str, **variables: Any) -> str | None:
        """Return the text that the template writes behind the last mark; None without the mark."""
        text = rendered(messages, **variables) or ""
        _, mark_found, text_after = text.rpartition(mark)
        return text_after.strip() if mark_found else None

    def note(names: Sequence[str]) -> None:
        if names:
            name = max(names, key=len)
            ends[added[name][0]] = name

    answer_tail = tail([PROBE_USER, _SAID], PROBE_CONTENT)
    next_head = tail([PROBE_USER, _SAID, PROBE_USER], PROBE_CONTENT) or ""
    answer_head = ""
    if answer_tail:
        pairs = zip(answer_tail, next_head, strict=False)
        shared = answer_tail[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))]
        prompt = rendered([PROBE_USER, _SAID], add_generation_prompt=True)
        if next_head and prompt == rendered([PROBE_USER, _SAID]):
            answer_head = answer_tail[len(shared) :]
        end = answer_tail.removesuffix(answer_head).strip()
        note([name for name in added if name.strip() and end.endswith(name.strip())])
        names = [name for name in added if name.strip() and name in shared]
        if names:
            note([max(names, key=lambda name: (shared.rfind(name) + len(name), len(name)))])
    elif answer_tail is not None and next_head:
        note(
            [name for name, (_, special) in added.items() if special and next_head.startswith(name)]
        )
    # Llama 3.1 ends a call with another token if a list of built-in tools is given, even empty.
    variable_sets: tuple[dict[str, Any], ...] = ({}, {"builtin_tools": []})
    for variables in variable_sets:
        call_tail = tail([PROBE_USER, PROBE_CALLED], PROBE_FUNCTION, **variables) or ""
        call_tail = call_tail.removesuffix(answer_head).strip()
        names = [name for name in added if call_tail.endswith(name) and not _ends_call(name)]
        if names:
            # A token that stands between two calls of one message does not end the message.
            pair = rendered([PROBE_USER, _CALLED_TWICE], **variables) or ""
            if pair != rendered([PROBE_USER, PROBE_CALLED, PROBE_CALLED], **variables):
                between = "".join(pair.split(PROBE_FUNCTION)[1:-1])
                names = [name for name in names if name not in between]
        note(names)
    return ends


def _added(tokenizer: PreTrainedTokenizerBase) -> dict[int, Any]:
    return dict(getattr(tokenizer, "added_tokens_decoder", {}))


def _ends_call(name: str) -> bool:
    """Return whether a token ends a call alone, as `</tool_call>` does: others may follow it."""
    return "tool" in name or not name.strip() or (name.startswith("</") and name != "</s>")
