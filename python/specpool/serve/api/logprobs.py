"""Log probabilities in the forms of OpenAI's two interfaces."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from specpool.engine.scheduler.request import TokenLogprob
from specpool.engine.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenLog:
    """A writer of one text's log probabilities. It takes the text's tokens in order."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, shows: Callable[[int], bool]) -> None:
        """Begin a text, in which these tokens are shown."""
        self._bytes, self._shows = TokenBytes(tokenizer), shows
        self._latest_token: int | None = None  # the latest token that is shown
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text_len = 0  # characters of the text so far

    def chat(self, entries: Sequence[TokenLogprob], num_top: int) -> dict[str, Any]:
        """Return `logprobs` of a chat's choice, with at most `num_top` alternatives."""
        content = []
        for entry in self._take(entries):
            top = [*entry.top.items()][:num_top]
            content_entry = self._chat_entry(entry.token_id, entry.logprob)
            content.append(
                content_entry | {"top_logprobs": [self._chat_entry(*pair) for pair in top]}
            )
        return {"content": content, "refusal": None}

    def completion(
        self, entries: Sequence[TokenLogprob], num_top: int, echo_len: int
    ) -> dict[str, Any]:
        """Return `logprobs` of a completion's choice.

        Args:
            entries: of the choice's new tokens.
            num_top: the most alternatives of a token.
            echo_len: characters that stand before the new text.
        """
        texts, offsets, tops = [], [], []
        for entry in self._take(entries):
            texts.append(self._text(entry.token_id))
            offsets.append(echo_len + self._text_len)
            top: dict[str, float] = {}
            for token, logprob in [*entry.top.items()][:num_top]:
                top.setdefault(self._text(token), finite(logprob))  # the likeliest of a text
            tops.append(top)
        return {
            "tokens": texts,
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": tops if num_top else None,
            "text_offset": offsets,
        }

    def _take(self, entries: Sequence[TokenLogprob]) -> Iterator[TokenLogprob]:
        """Yield each entry while the tokens before it are the text, and then add its token."""
        for entry in entries:
            yield entry
            if self._shows(entry.token_id):
                new = self._decoder.decode(self._bytes.bytes_of(entry.token_id, self._latest_token))
                self._text_len += len(new)
                self._latest_token = entry.token_id

    def _chat_entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._bytes.bytes_of(token, self._latest_token)
        return {"token": _text_of(data), "logprob": finite(logprob), "bytes": [*data]}

    def _text(self, token: int) -> str:
        return _text_of(self._bytes.bytes_of(token, self._latest_token), "bytes:")


def _text_of(data: bytes, mark: str = "") -> str:
    r"""Return a token's text; a part of a character as OpenAI writes it, such as `\xe2\x98`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return mark + "".join(rf"\x{byte:02x}" for byte in data)


def finite(value: float) -> float:
    """Return a number that JSON has: OpenAI says -9999 for a token that cannot come."""
    return value if value > -9999.0 else -9999.0
