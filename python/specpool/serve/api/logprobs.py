"""Log probabilities in the forms of OpenAI's two interfaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specpool.scheduler.requests.request import TokenLogprob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Return the text of a token alone; a part of a character shows as U+FFFD."""
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return str(text)


def chat_logprobs(
    tokenizer: PreTrainedTokenizerBase, entries: Sequence[TokenLogprob], num_top: int
) -> dict[str, Any]:
    """Return `logprobs` of a chat's choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(tokenizer, token)
        return {"token": text, "logprob": finite(logprob), "bytes": [*text.encode()]}

    content = []
    for each in entries:
        top = [*each.top.items()][:num_top]
        one = entry(each.token_id, each.logprob)
        content.append(one | {"top_logprobs": [entry(*pair) for pair in top]})
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: PreTrainedTokenizerBase, entries: Sequence[TokenLogprob], num_top: int, offset: int
) -> dict[str, Any]:
    """Return `logprobs` of a completion's choice.

    Args:
        tokenizer: the target's.
        entries: of the choice's new tokens.
        num_top: the most alternatives of a token.
        offset: the characters of the choice's earlier text.
    """
    texts = [token_text(tokenizer, each.token_id) for each in entries]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tops = [
        {token_text(tokenizer, t): finite(p) for t, p in [*each.top.items()][:num_top]}
        for each in entries
    ]
    return {
        "tokens": texts,
        "token_logprobs": [finite(each.logprob) for each in entries],
        "top_logprobs": tops if num_top else None,
        "text_offset": offsets,
    }


def finite(value: float) -> float:
    """Return a number that JSON has: OpenAI says -9999 for a token that cannot come."""
    return value if value > -9999.0 else -9999.0
