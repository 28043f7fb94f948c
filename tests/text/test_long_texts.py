"""A text that is far too long is refused by its beginning."""

from __future__ import annotations

import inspect
import logging

import pytest
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from specpool import ConfigError
from specpool.engine.assets import resolve
from specpool.engine.text.chat_template import RESERVED
from specpool.engine.text.tokenizer import load_tokenizer
from specpool.engine.texts import Texts, num_characters


class Counting:
    """A tokenizer that counts the characters it was given."""

    def __init__(self):
        self._inner, self.num_seen = load_tokenizer(resolve("specpool/tiny")), 0

    def encode(self, text, **options):
        self.num_seen += len(text)
        return self._inner.encode(text, **options)


def test_a_text_is_tokenized_only_until_it_cannot_fit():
    """Law: the work does not grow with the text beyond what fits."""
    tokenizer = Counting()
    texts = Texts(tokenizer, 2048)
    with pytest.raises(ConfigError, match=r"of the prompt's 5000000 characters.* is 2048"):
        texts.encode(0, "a" * 5_000_000)
    assert tokenizer.num_seen <= 1 << 16
    assert len(texts.encode(0, "a" * 9000)) == 9000  # the caller tells what is left of it
    assert len(Texts(tokenizer).encode(0, "a" * 100_000)) == 100_000


def test_a_long_text_raises_no_warning_of_transformers(caplog: pytest.LogCaptureFixture) -> None:
    """Law: a text is measured by `max_context_len`, never by the tokenizer's own bound."""
    tokenizer = load_tokenizer(resolve("specpool/tiny"))
    tokenizer.model_max_length = 4
    caplog.set_level(logging.WARNING, logger="transformers")
    assert len(Texts(tokenizer).encode(0, "abcdef")) == 6
    assert not caplog.records


def test_a_chats_characters_are_those_of_its_texts():
    parts = [{"type": "text", "text": "abc"}, {"type": "image_url"}, {"text": 5}, "x"]
    parts += [{"type": "refusal", "refusal": "defg", "text": "h"}]
    chat = [{"role": "user", "content": "ab"}, {"content": parts}, {"content": None}, {}]
    assert num_characters(chat) == 9
    assert num_characters("abcd") == 4 and num_characters([1, 2]) == 0


def test_no_variable_of_a_template_has_a_name_that_its_call_takes():
    """Law: `render` and a tokenizer class's own `apply_chat_template` never get a name twice."""
    template_parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    common = inspect.signature(render_jinja_template).parameters
    names = {*template_parameters, *common} - {
        "kwargs",
        "documents",
    }  # documents are for the template
    assert names <= RESERVED
