"""`Compiler`: turns a `Grammar` into a `Matcher`, with llguidance, and keeps what it compiled."""

from __future__ import annotations

import copy
import json
import re
import threading
import time
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

from specpool.engine.text.structured.exact_schema import MAPS, VALUES, exact, plain
from specpool.engine.text.structured.grammar import Grammar
from specpool.engine.text.structured.matcher import Matcher, refusal, shortened
from specpool.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

#: Compiled grammars that are kept, the latest used ones.
MAX_COMPILED = 128
#: Seconds that a grammar may take to compile.
MAX_SECONDS = 10.0
#: A form that took longer to compile is not compiled again between two rounds, which would wait.
RENEWAL_SECONDS = 0.05
#: Items of llguidance's parser in one step, and the cost of its lexer; beyond, a request ends.
MAX_ITEMS, MAX_LEXER_COST = 50_000, 200_000
#: The states of a lexer, to which all texts in one form have led since it was compiled.
MAX_STATES = 250_000


class Compiler:
    """A compiler of grammars over one tokenizer; any thread may call it.

    Attributes:
        vocabulary: the tokenizer's tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        eos_ids: frozenset[int],
    ) -> None:
        """Compile nothing yet.

        Args:
            tokenizer: knows each token's bytes; if None, no grammar can be compiled.
            vocab_size: the target's.
            eos_ids: the tokens that end a text of the target.
        """
        self._vocab_size, self._eos_ids = vocab_size, eos_ids
        self.vocabulary = Vocabulary(tokenizer, vocab_size, eos_ids)
        # The cache keeps only results, so a wrong grammar is compiled and refused each time.
        self._compiled = lru_cache(MAX_COMPILED)(partial(_Compiled, self.vocabulary))

    def matcher(self, grammar: Grammar, stop_ids: frozenset[int] = frozenset()) -> Matcher:
        """Return a matcher at the start of a grammar; compile it unless that was done before.

        Compiling takes a millisecond for a small schema. The first call also reads the vocabulary,
        which takes a quarter of a second for 32,000 tokens.

        Args:
            grammar: the form.
            stop_ids: tokens that end the output, beside those that end every text of the target.

        Raises:
            ConfigError: the package is missing, the tokenizer cannot be read, or the grammar is
                wrong, allows no text, or is too large; the message says where.
        """
        form: _Compiled = self._compiled(grammar)
        return Matcher(
            form.engine(), self._vocab_size, self._eos_ids | stop_ids, renewed=form.renewed
        )


class _Compiled:
    """A compiled grammar, which is compiled again when its lexer is full.

    All copies of an `LLMatcher` share a lexer. It keeps each state that any of their texts has led
    to, and fails for all of them at `MAX_STATES`: one request's text would end those of others.
    """

    def __init__(self, vocabulary: Vocabulary, grammar: Grammar) -> None:
        self._vocabulary, self._grammar = vocabulary, grammar
        self._lock = threading.Lock()
        self._compile()

    def engine(self) -> Any:
        """Return an `LLMatcher` at the start, whose lexer has room."""
        with self._lock:
            first = self._engine.deep_copy()
            first.compute_bitmask()
            if first.is_error():  # it was none when it was compiled
                self._compile()
            return self._engine

    def renewed(self, engine: Any) -> Any:
        """Return another than this one, whose lexer is full; None if that would take long."""
        with self._lock:
            if self._engine is engine and self._seconds <= RENEWAL_SECONDS:
                self._compile()
            return None if self._engine is engine else self._engine

    def _compile(self) -> None:
        self._engine, self._seconds = _within_time(self._vocabulary, self._grammar)


def check_grammar(grammar: Grammar) -> None:
    """Refuse a wrong grammar, as far as it can be checked without a tokenizer; imports no torch.

    Raises:
        ConfigError: the package is missing, or the grammar is wrong; the message says where.
    """
    library = _library()
    message = library.LLMatcher.validate_grammar(_checked_source(library, grammar))
    if message:
        raise _refused(grammar, message)


class Vocabulary:
    """The tokens' bytes, which are read at the first use."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        eos_ids: frozenset[int],
    ) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, eos_ids
        self._read: Any = None  # llguidance.LLTokenizer

    def get(self) -> Any:
        """Return them as llguidance keeps them."""
        if self._read is None:
            self._read = self._from_tokenizer()
        return self._read

    def source(self) -> list[Any]:
        """Return the tokenizer as JSON, its size and the ends, for a vocabulary in another process.

        Raises:
            ConfigError: the tokenizer cannot be read.
        """
        tokenizer = copy.copy(self._checked().backend_tokenizer)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return [tokenizer.to_str(), self._size(), sorted(self._eos_ids)]

    def _size(self) -> int:
        # A mask has a bit for each token of the tokenizer, even beyond the target's.
        return max(len(self._checked()), self._vocab_size)

    def _checked(self) -> PreTrainedTokenizerFast:
        """Return the tokenizer, if a form can be compiled over it."""
        from transformers import PreTrainedTokenizerFast

        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise ConfigError(
                "structured: a form needs the bytes of each token, from a fast tokenizer; the "
                f"target's is {type(self._tokenizer).__name__}"
            )
        if not self._eos_ids:
            raise ConfigError(
                "structured: a form needs a token that ends the text, and the target has none"
            )
        return self._tokenizer

    def _from_tokenizer(self) -> Any:
        source = self.source()
        try:
            return token_trie(*source)
        except Exception as error:
            raise ConfigError(
                f"structured: the target's tokenizer cannot be read: {error}"
            ) from error


def token_trie(tokenizer: str, size: int, eos_ids: list[int]) -> Any:
    """Return a tokenizer as llguidance keeps it, which spells the name of any token in a form.

    Args:
        tokenizer: as JSON.
        size: the tokens of a mask; those beyond the tokenizer's have no text.
        eos_ids: the tokens that end a text.
    """
    library = _library()
    tokens = library.LLTokenizer(tokenizer, n_vocab=size, eos_token=eos_ids, slices=[])
    return library.LLTokenizer(_Speller(tokens), eos_token=eos_ids)


class _Speller:
    """Tokenizes the text that a form forces, as the tokenizer does, with tokens that have a text.

    llguidance itself would take `<think>` in such a text for the token of that name, which it then
    refuses, because a token of that kind has no text for it. Its `TokenizerWrapper` has these
    attributes too.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Any) -> None:
        """Wrap an `llguidance.LLTokenizer`."""
        self._tokens = tokens
        self.eos_token_id: int = tokens.eos_token
        self.special_token_ids = [i for i in range(tokens.vocab_size) if tokens.is_special_token(i)]
        self._special_ids = frozenset(self.special_token_ids)
        self.tokens = [self._bytes(token) for token in range(tokens.vocab_size)]

    def _bytes(self, token: int) -> bytes:
        """Return a token's bytes, without the byte that marks a special one."""
        text: bytes = self._tokens.decode_bytes([token])
        is_missing = token not in self._special_ids and text == b"<[%d]>" % token
        return b"" if is_missing else text

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text.

        If the tokenizer finds a special token in it, or gives other bytes, the longest tokens
        count from there on.
        """
        ids: list[int] = self._tokens.tokenize_str(text)
        num_plain = next((i for i, token in enumerate(ids) if token in self._special_ids), len(ids))
        plain = ids[:num_plain]
        beginning: bytes = self._tokens.decode_bytes(plain)
        if beginning == text.encode():
            return plain
        prefix = beginning.decode(errors="replace")
        if not text.startswith(prefix):
            plain, prefix = [], ""
        return [*plain, *self._tokens.greedy_tokenize(text[len(prefix) :])]


def _within_time(vocabulary: Vocabulary, grammar: Grammar) -> tuple[Any, float]:
    """Compile in a thread of its own, because nothing can stop the library.

    Returns:
        What `compiled` returns, and the seconds that it took.
    """
    results: list[Any] = []

    def work() -> None:
        try:
            vocabulary.get()  # its first call does not count
            begin = time.perf_counter()
            results.append((compiled(vocabulary, grammar), time.perf_counter() - begin))
        except Exception as error:
            results.append(error)
        except BaseException as error:  # a panic of the library: nothing interrupts this thread
            results.append(refusal(f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=work, name="specpool-grammar", daemon=True)
    thread.start()
    thread.join(MAX_SECONDS)
    if not results:
        raise ConfigError(
            f"structured: a {grammar.kind} of {len(grammar.text)} characters took more than "
            f"{MAX_SECONDS:g} s to compile: make it smaller"
        )
    if isinstance(results[0], Exception):
        raise results[0]
    result: tuple[Any, float] = results[0]
    return result


def compiled(vocabulary: Any, grammar: Grammar) -> Any:
    """Return an `LLMatcher` at the start of the grammar."""
    library, tokens = _library(), vocabulary.get()
    source = _checked_source(library, grammar)
    limits = library.LLParserLimits(
        max_items_in_row=MAX_ITEMS,  # its own limit is below the strings that a choice may have
        step_max_items=MAX_ITEMS,
        step_lexer_fuel=MAX_LEXER_COST,
        max_lexer_states=MAX_STATES,
        verbose_errors=False,
    )
    engine = library.LLMatcher(tokens, source, log_level=0, limits=limits)
    first = engine.deep_copy()
    if not engine.is_error():
        first.compute_bitmask()  # some faults show in the first step alone
    if first.is_error() and first.get_error().startswith("NoExtension"):
        raise ConfigError(f"structured: the {grammar.kind} allows no text at all")
    if first.is_error():
        raise _refused(grammar, first.get_error())
    return engine


def _checked_source(library: Any, grammar: Grammar) -> str:
    try:
        return _source(library, grammar)
    except ValueError as error:
        raise refusal(str(error)) from None


def _refused(grammar: Grammar, message: str) -> ConfigError:
    message = shortened(message)
    if message.startswith("oneOf constraints"):  # it advises an option of its own
        message = "oneOf whose parts may overlap is not supported: give anyOf"
    return ConfigError(f"structured: {message}{_location(grammar, message)}")


def _library() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError:
        raise ConfigError(
            "structured: a form needs llguidance: pip install 'specpool[grammar]'"
        ) from None
    return llguidance


def _source(library: Any, grammar: Grammar) -> str:
    """Return the grammar in llguidance's own notation."""
    if grammar.kind in ("json_schema", "json_object"):
        schema = '{"type": "object"}'
        if grammar.kind == "json_schema":
            schema = plain(grammar.text, cache(partial(_contradicts, library)))
        # No blanks between the tokens of the text: they would allow a second token everywhere.
        options = {"whitespace_flexible": False}
        schema = "{}" if schema.strip() == "true" else schema
        # It takes no two patterns of names in one object, which `allOf` can bring together.
        for written in dict.fromkeys([exact(schema), exact(schema, closes_names=False), schema]):
            source = str(library.LLMatcher.grammar_from_json_schema(written, overrides=options))
            if written == schema or not library.LLMatcher.validate_grammar(source):
                break
        return source
    return str(library.grammar_from(grammar.kind, grammar.text))


def _contradicts(library: Any, name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether no text has both a format of JSON Schema and all of these patterns."""
    schema = {"type": "string", "format": name, "allOf": [{"pattern": text} for text in patterns]}
    source = library.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    message: str = library.LLMatcher.validate_grammar(source)
    return "Unsatisfiable schema" in message


def _location(grammar: Grammar, message: str) -> str:
    """Return the location in a schema that an error names; "" if it names none."""
    if grammar.kind != "json_schema":
        return ""
    names = re.findall(r"[\"'`]([^\"'`]+)[\"'`]", message) + re.findall(r": ([\w-]+)$", message)
    names += re.findall(r"^(\w+) whose", message)
    for name in names:
        pointer = _pointer(json.loads(grammar.text), name)
        if pointer is not None:
            return f" (at {pointer})"
    return ""


def _pointer(value: Any, name: str, path: str = "#", has_names: bool = False) -> str | None:
    """Return the JSON pointer of the first keyword or string `name`, or None.

    Args:
        value: a part of a schema.
        name: the keyword, such as `not`, or the value of one.
        path: the pointer of `value`.
        has_names: the keys of `value` are names of a user's choice, not keywords.
    """
    entries: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        entries = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        entries = [(str(index), item) for index, item in enumerate(value)]
    for key, item in entries:
        pointer = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
        is_keyword = isinstance(value, dict) and not has_names
        if (is_keyword and key == name) or item == name:
            return pointer
        if is_keyword and key in VALUES:
            continue
        nested_pointer = _pointer(item, name, pointer, is_keyword and key in MAPS)
        if nested_pointer is not None:
            return nested_pointer
    return None
