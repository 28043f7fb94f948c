"""`Texts`: turns texts and chats into token ids, by the tokenizer and its chat template."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from specpool.checks import shown
from specpool.engine.sampling_params import SamplingParams
from specpool.engine.scheduler.request import Conversation, Message, Said, common_len
from specpool.engine.text.chat_ends import chat_ends
from specpool.engine.text.chat_messages import (
    PROBE_CALLED,
    PROBE_RESULT,
    PROBE_TOOL,
    PROBE_USER,
    RESULT_ROLES,
    SEAM,
    CallForm,
    ThoughtForm,
    call_form,
    prepared,
    template_of,
    thought_form,
    thoughts_of,
    tool_forms,
    with_blank_answers,
    with_seams,
)
from specpool.engine.text.chat_template import TemplateError, TemplateLimitError
from specpool.engine.text.chat_template import render as render_template
from specpool.engine.text.stream import TextStream
from specpool.errors import ConfigError, is_fault, reading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger("specpool")

#: A text, token ids, or the messages of a chat.
Prompt = str | Sequence[int] | Sequence[Message]


#: A text with more than this many characters for each token that fits is first checked by pieces.
_LONG = 8
#: Characters of a piece.
_PIECE = 1 << 16
#: Chats that show how a template reads contents; a template may not take the first.
_PROBES = ([PROBE_USER, PROBE_CALLED, PROBE_RESULT], [PROBE_USER])


@dataclass(frozen=True, slots=True)
class NextTurn:
    """A conversation's next turn in tokens.

    Attributes:
        tokens: all tokens of the conversation up to where the answer begins.
        said: where each earlier turn ends in them.
        messages: the chat messages that begin the turn; None if it begins with text or token ids.
        history_len: the tokens that the conversation had.
    """

    tokens: list[int]
    said: list[Said]
    messages: tuple[Message, ...] | None
    history_len: int


class Texts:
    """A tokenizer of prompts. It knows no model, so it may work outside the engine's process."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, max_context_len: int | None = None
    ) -> None:
        """Tokenize texts.

        Args:
            tokenizer: without one, prompts are token ids.
            max_context_len: the most tokens of a sequence: a text with more than twice as many is
                refused before all of it is tokenized; None if texts of any length are tokenized.
        """
        self._tokenizer, self._max_context_len = tokenizer, max_context_len
        self._ends: dict[str, dict[int, str]] = {}  # of the latest chat template
        self._has_logged_ends = False  # the log has those that the target does not name
        self._wants_parts: dict[str, bool] = {}  # by chat template; see `_has_parts`
        #: By chat template and whether there are tools; see `_call_form`.
        self._call_forms: dict[tuple[str, bool], CallForm] = {}
        #: By the same; see `_thought_form`.
        self._thought_forms: dict[tuple[str, bool], ThoughtForm | None] = {}

    def chat_params(
        self, params: SamplingParams, eos_token_ids: frozenset[int], vocab_size: int
    ) -> SamplingParams:
        """Return the parameters of a chat: the tokens that end its answers stop it too.

        Tokens that the target does not name itself are logged once for a chat template.

        Args:
            params: of the chat; with `ignore_eos` they stay as they are.
            eos_token_ids: the target's, which stop it anyway.
            vocab_size: the target's.
        """
        if params.ignore_eos:
            return params
        ends = self.chat_ends()
        new_ends = [i for i in ends if i not in eos_token_ids and i < vocab_size]
        if new_ends and not self._has_logged_ends:
            names = ", ".join(f"{ends[token]} ({token})" for token in new_ends)
            _log.info("answers of chats end at %s, which the model's config does not list", names)
            self._has_logged_ends = True
        new_ends = [i for i in new_ends if i not in params.stop_token_ids]
        if not new_ends:
            return params
        return dataclasses.replace(params, stop_token_ids=(*params.stop_token_ids, *new_ends))

    def chat_ends(self) -> dict[int, str]:
        """Return the tokens that end the answer of a chat, with their names.

        The first call for a chat template renders a few chats.
        """
        tokenizer = self._tokenizer
        assert tokenizer is not None
        template = str(tokenizer.chat_template)
        ends = self._ends.get(template)
        if ends is None:
            ends = chat_ends(tokenizer, lambda chat, variables: self.render(0, chat, variables))
            self._ends, self._has_logged_ends = {template: ends}, False
        return ends

    def turn(
        self, conversation: Conversation, prompt: Prompt, variables: Mapping[str, Any] | None = None
    ) -> NextTurn:
        """Tokenize a conversation's next turn; see `Session.append` and, for `variables`, `render`.

        Raises:
            ConfigError: the prompt cannot follow the conversation.
        """
        history = conversation.tokens
        if is_chat(prompt):
            messages = tuple(self.messages(0, cast("Sequence[Message]", prompt)))
            tokens, said = self._continue_chat(conversation, messages, variables)
            return NextTurn(tokens, said, messages, len(history))
        tokens = [*history, *self.encode(0, prompt, adds_special=not history)]
        return NextTurn(tokens, list(conversation.said), None, len(history))

    def encode(
        self,
        index: int,
        prompt: Prompt,
        *,
        adds_special: bool | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the prompt's token ids.

        Args:
            index: the prompt's number, for errors.
            prompt: a text, a chat or token ids, which stay as they are.
            adds_special: add the special tokens that begin a text; None adds them to any prompt but
                a chat, whose template writes them.
            variables: see `render`.

        Raises:
            ConfigError: the prompt has another form, or the tokenizer or its template refuses it.
        """
        if is_chat(prompt):
            messages = self.messages(index, cast("Sequence[Message]", prompt))
            text = self.render(index, messages, variables)
            return self._tokens_of(text, f"prompt {index}", adds_special=bool(adds_special))
        if not isinstance(prompt, str):
            return token_ids(prompt, f"prompt {index} must be a string or integer token ids")
        if self._tokenizer is None:
            raise ConfigError(
                f"prompt {index} is a string, but the target has no tokenizer: give token ids"
            )
        _check_text(f"prompt {index}", prompt)
        return self._tokens_of(prompt, f"prompt {index}", adds_special=adds_special is not False)

    def messages(self, index: int, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return a copy of a chat's messages, checked, with each content as one string.

        Raises:
            ConfigError: a message has another form, or there is no chat template.
        """
        if self._tokenizer is None:
            raise ConfigError(
                f"prompt {index} is a chat, but the target has no tokenizer: give token ids"
            )
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(
                f"prompt {index} is a chat, but the tokenizer has no chat template: set its "
                "chat_template, or give text"
            )
        copies = []
        for number, message in enumerate(messages):
            name = f"message {number} of prompt {index}"
            if not isinstance(message, Mapping):
                raise ConfigError(f"{name} must be a dict, got {shown(message)}")
            copy = dict(message)
            if isinstance(parts := message.get("content"), list | tuple):
                if message.get("role") == "assistant" and any(map(_is_thought, parts)):
                    thoughts = _thoughts_of_parts(name, parts)
                    if thoughts != (field := thoughts_of(message)):
                        copy["reasoning_content"] = field + thoughts
                    parts = [part for part in parts if not _is_thought(part)]
                copy["content"] = _text_of_parts(name, parts)
            if copy.get("role") == "assistant" and copy.get("content") is None:
                copy["content"] = ""  # an answer that was calls alone
            for key in ("role", "content"):
                if not isinstance(copy.get(key), str):
                    raise ConfigError(f"{name} needs a string as {key!r}, got {shown(message)}")
                _check_text(f"{key!r} of {name}", copy[key])
            _check_texts(name, copy)
            copies.append(copy)
        return copies

    def render(
        self,
        index: int,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a chat with the tokenizer's template, up to where the answer begins.

        Args:
            index: the prompt's number, for errors.
            messages: what `messages` gave.
            variables: further variables of the template, such as `tools`.

        Returns:
            The text; with a `SEAM` in each name of a control token that a tool's result spells.

        Raises:
            ConfigError: the template refuses the messages, or makes no valid text of them.
        """
        _check_texts(f"the variables of prompt {index}", variables or {})
        text = self._named_errors(index, messages, variables)
        _check_text(f"what the chat template makes of prompt {index}", text.replace(SEAM, ""))
        return text

    def _named_errors(
        self, index: int, messages: Sequence[Message], variables: Mapping[str, Any] | None
    ) -> str:
        """Render messages; an error names the prompt."""
        tokenizer = self._tokenizer
        assert tokenizer is not None
        try:
            if _renders_templates(tokenizer):
                templates = cast("str | dict[str, str]", tokenizer.chat_template)
                template = template_of(templates, variables or {})
                return self._rendered(template, messages, variables or {})
            # A tokenizer class with its own `apply_chat_template` renders by itself.
            return str(
                tokenizer.apply_chat_template(
                    cast("list[dict[str, str]]", prepared(messages, str(tokenizer.chat_template))),
                    tokenize=False,
                    **{"add_generation_prompt": True, **(variables or {})},
                )
            )
        except ConfigError:
            raise
        except TemplateError as error:
            raise ConfigError(f"the chat template refuses prompt {index}: {error}") from error
        except BaseException as error:  # a tokenizer's own code may raise anything
            if not is_fault(error):
                raise
            raise ConfigError(
                f"the chat template refuses prompt {index}: {type(error).__name__}: {error}"
            ) from error

    def _rendered(
        self, template: str, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> str:
        """Render messages in the form that the template expects.

        If the template refuses an empty answer, a space stands in its place, but not in that of a
        last message which is to go on.

        Raises:
            TemplateError: see `render_template`.
        """
        try:
            return self._in_forms(template, messages, variables)
        except TemplateLimitError:
            raise
        except TemplateError:
            end = len(messages) - bool(variables.get("continue_final_message"))
            filled = [*with_blank_answers(messages[:end]), *messages[end:]]
            if filled != list(messages):
                with contextlib.suppress(TemplateError):
                    return self._in_forms(template, filled, variables)
            raise

    def _in_forms(
        self, template: str, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> str:
        """Render messages whose calls and thoughts have the form that the template expects.

        A template that shows no call in a short chat may still join the arguments of calls to other
        text, which is a `TypeError` if they are objects; it gets them as JSON text.

        Raises:
            TemplateError: see `render_template`.
        """
        assert self._tokenizer is not None
        special = self._tokenizer.special_tokens_map
        variables = {**special, **variables}
        has_parts = self._has_parts(template, special)
        form = CallForm()
        if any(message.get("tool_calls") for message in messages):
            form = self._call_form(template, special, bool(variables.get("tools")), has_parts)
        thoughts: ThoughtForm | None = ThoughtForm.FIELD
        if any(map(thoughts_of, messages)):
            thoughts = self._thought_form(template, special, variables)
        if any(message.get("role") in RESULT_ROLES for message in messages):
            tokens = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
            added = {str(token.content): bool(token.special) for token in tokens}
            messages = with_seams(messages, template, added)

        def in_form(form: CallForm) -> list[dict[str, Any]]:
            return prepared(
                messages, template, form=form, thought_form=thoughts, has_parts=has_parts
            )

        chat = in_form(form)
        try:
            return self._with_tools(template, chat, variables)
        except TemplateError as error:
            other_chat = in_form(dataclasses.replace(form, has_objects=not form.has_objects))
            if not str(error).startswith("TypeError") or other_chat == chat:
                raise
            try:
                return self._with_tools(template, other_chat, variables)
            except TemplateError:
                raise error from None

    def _with_tools(
        self, template: str, chat: Sequence[Message], variables: Mapping[str, Any]
    ) -> str:
        """Render messages, with the tools in the first form that the template takes.

        Raises:
            TemplateError: it takes none; see `render_template`.
        """
        errors: list[TemplateError] = []
        for form in tool_forms(variables):
            try:
                return render_template(template, chat, form)
            except TemplateLimitError:
                raise
            except TemplateError as error:
                errors.append(error)
        # If whole functions change the error, it was about them, and the new one is about the rest.
        first, *others = errors
        raise others[0] if others and str(others[0]) != str(first) else first

    def _call_form(
        self, template: str, special: Mapping[str, Any], has_tools: bool, has_parts: bool
    ) -> CallForm:
        """Return how a template expects calls; the first call for it renders a few short chats.

        They have a tool of their own: a request's tools would decide about all later requests.
        """
        key = template, has_tools
        if key not in self._call_forms:
            variables = {**special, **({"tools": [PROBE_TOOL]} if has_tools else {})}

            def render(messages: Sequence[Message], form: CallForm) -> str | None:
                chat = prepared(messages, template, form=form, has_parts=has_parts)
                return self._probed(template, chat, variables)

            self._call_forms[key] = call_form(render)
        return self._call_forms[key]

    def reads_thoughts(self, variables: Mapping[str, Any]) -> bool:
        """Return whether the chat template reads the thoughts of answers in a chat's history.

        A tokenizer class with its own `apply_chat_template` is not looked at: it may.

        Args:
            variables: of a chat with thoughts that has been rendered; see `render`.
        """
        tokenizer = self._tokenizer
        assert tokenizer is not None
        if not _renders_templates(tokenizer):
            return True
        template = template_of(cast("str | dict[str, str]", tokenizer.chat_template), variables)
        if (template, bool(variables.get("tools"))) not in self._thought_forms:
            return True  # no chat had thoughts so far
        return self._thought_form(template, tokenizer.special_tokens_map, variables) is not None

    def _thought_form(
        self, template: str, special: Mapping[str, Any], variables: Mapping[str, Any]
    ) -> ThoughtForm | None:
        """Return how a template expects thoughts; the first call renders a few short chats.

        transformers cannot go on with a content of blocks, so such a chat has no thoughts.
        """
        has_tools = bool(variables.get("tools"))
        key = template, has_tools
        if key not in self._thought_forms:
            probed = {
                **special,
                "add_generation_prompt": False,
                **({"tools": [PROBE_TOOL]} if has_tools else {}),
            }
            has_parts = self._has_parts(template, special)
            form = self._call_form(template, special, has_tools, has_parts)

            def render(messages: Sequence[Message], thoughts: ThoughtForm) -> str | None:
                chat = prepared(
                    messages, template, form=form, thought_form=thoughts, has_parts=has_parts
                )
                return self._probed(template, chat, probed)

            self._thought_forms[key] = thought_form(template, render)
        thoughts = self._thought_forms[key]
        is_continued = bool(variables.get("continue_final_message"))
        return None if thoughts is ThoughtForm.BLOCKS and is_continued else thoughts

    def _probed(
        self, template: str, chat: Sequence[Message], variables: Mapping[str, Any]
    ) -> str | None:
        """Render a chat that shows how a template reads it; None if the template refuses it."""
        try:
            return self._with_tools(template, chat, variables)
        except TemplateLimitError:
            raise
        except TemplateError:
            return None

    def _has_parts(self, template: str, special: Mapping[str, Any]) -> bool:
        """Return whether a template reads contents only as lists of parts, as of images and text.

        Command A's reads those of tools' results so. The first call for a template renders a few
        short chats.
        """
        if template not in self._wants_parts:
            has_parts = False
            if "content" in template and "type" in template:
                for probe, has_parts in itertools.product(_PROBES, (False, True)):
                    if self._shows_contents(probe, template, special, has_parts):
                        break
                else:
                    has_parts = False
            self._wants_parts[template] = has_parts
        return self._wants_parts[template]

    def _shows_contents(
        self,
        chat: Sequence[Message],
        template: str,
        special: Mapping[str, Any],
        has_parts: bool,
    ) -> bool:
        """Return whether a template shows each content of a chat, as text or as lists of parts."""
        plain = prepared(chat, template, has_parts=has_parts)
        try:
            text = render_template(template, plain, special)
        except TemplateLimitError:
            raise
        except TemplateError:
            return False
        return all(message["content"] in text for message in chat)

    def _continue_chat(
        self,
        conversation: Conversation,
        new: tuple[Message, ...],
        variables: Mapping[str, Any] | None,
    ) -> tuple[list[int], list[Said]]:
        """Tokenize the next turn of a chat; also return where each earlier turn ends now.

        If the rendered chat begins with the text of the session's tokens, these tokens are kept.
        Tokenizing an answer again could give other ids, and the KV of the answer would be lost. If
        the text differs, for example because the template leaves out an answer's thoughts, the
        whole chat is tokenized again.
        """
        turns, start = conversation.said, 0
        old: list[Message] = []
        marked: list[Message] = []  # the same with the special tokens of the answers
        called: list[Message] = []  # the same with the calls of the answers beside their contents
        for turn in turns:
            if turn.messages is None:
                raise ConfigError(
                    f"the session's tokens from {start} on are text or token ids, not a chat: go "
                    f"on with the like, or rewind to {start}"
                )
            old += [*turn.messages, self._answer(turn)]
            marked += [*turn.messages, self._answer(turn, shows_special=True)]
            called += [*turn.messages, turn.message or self._answer(turn)]
            start = turn.end
        kept_ids = conversation.tokens[:start]  # without the part of a turn that a rewind has left
        kept_text = self._text_of(kept_ids)
        # A call in a text needs its marks, without which it would not be one. Some templates refuse
        # them there, or the result of a call that is not beside the content.
        text: str | None
        for history in [*(chat for chat in (called, marked) if chat != old), old]:
            text = None
            with contextlib.suppress(ConfigError):
                text = self.render(0, [*history, *new], variables)
                if text.replace(SEAM, "").startswith(kept_text):
                    break
        else:
            history = called
            if text is None or called != old:
                text = self.render(0, [*called, *new], variables)
        assert text is not None
        plain = text.replace(SEAM, "")
        if plain.startswith(kept_text):
            begin = len(kept_text)
            while begin - text.count(SEAM, 0, begin) < len(kept_text):
                begin = len(kept_text) + text.count(SEAM, 0, begin)
            tokens = [*kept_ids, *self._tokens_of(text[begin:], "the turn")]
            if self._text_of(tokens) == plain:
                return tokens, turns
        tokens = self._tokens_of(text, "the turn")
        num_same = common_len(kept_ids, tokens)
        if num_same == start:
            return tokens, turns
        # The old turns end where the tokens begin to depend on the new message: render the chat
        # with another message in its place, and see where the texts part. A template may refuse
        # that message; the old turns then end where the tokens begin to differ from theirs.
        other = "-" if new[0]["content"].strip()[:1] != "-" else "+"
        end = num_same
        with contextlib.suppress(ConfigError):
            other_text = self.render(0, [*history, {**new[0], "content": other}], variables)
            end = common_len(
                self._tokens_of(text[: common_len(text, other_text)], "the turn"), tokens
            )
        return tokens, [
            # A rewind to 0 forgets them, even if their first token has changed.
            dataclasses.replace(turn, end=max(num_same, end, 1)) if turn.end > num_same else turn
            for turn in turns
        ]

    def _answer(self, turn: Said, *, shows_special: bool = False) -> Message:
        """Return the model's answer of a turn, as a chat message."""
        with reading("the tokenizer cannot decode an earlier answer", ConfigError):
            stream = TextStream(self._tokenizer, turn.stop, shows_special=shows_special)
            text = stream.push(turn.answer_ids, last=True)
        return {"role": "assistant", "content": text}

    def _text_of(self, tokens: list[int]) -> str:
        """Decode tokens to text, special tokens included."""
        assert self._tokenizer is not None
        with reading("the tokenizer cannot decode the session's tokens", ConfigError):
            text = self._tokenizer.decode(
                tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        return str(text)

    def _tokens_of(self, text: str, name: str, *, adds_special: bool = False) -> list[int]:
        """Tokenize a text, cut at each `SEAM`; by default without special tokens that begin it.

        Raises:
            ConfigError: it has far more tokens than a sequence, or the tokenizer refuses it; the
                message says `name`.
        """
        assert self._tokenizer is not None
        max_len = self._max_context_len
        with reading(f"the tokenizer refuses {name}", ConfigError):
            if max_len is not None and len(text) > _LONG * max_len:
                self._check_len(text.replace(SEAM, ""), max_len)
            first, *parts = text.split(SEAM)
            if max_len is not None and len(parts) > max_len:
                raise ConfigError(
                    f"the tools' results of {name} spell {len(parts)} control tokens; "
                    f"max_context_len is {max_len}"
                )
            # max_context_len is checked by name, so transformers' own warning says nothing new.
            tokens = list(
                self._tokenizer.encode(first, add_special_tokens=adds_special, verbose=False)
            )
            if parts:
                lists = self._tokenizer(parts, add_special_tokens=False, verbose=False)
                tokens += itertools.chain.from_iterable(lists["input_ids"])
            return tokens

    def _check_len(self, text: str, max_len: int) -> None:
        """Refuse a long text by its beginning: its pieces are tokenized until they are too many.

        A cut gives some tokens more than the whole text has, hence twice as many as may be.
        """
        assert self._tokenizer is not None
        count = 0
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            count += len(self._tokenizer.encode(piece, add_special_tokens=False, verbose=False))
            if count > 2 * max_len:
                raise ConfigError(
                    f"the first {start + len(piece)} of the prompt's {len(text)} characters have "
                    f"{count} tokens; max_context_len is {max_len}"
                )


def _renders_templates(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether transformers renders a tokenizer's template, not the tokenizer's own code."""
    from transformers import PreTrainedTokenizerBase

    return type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template


def token_ids(value: object, law: str) -> list[int]:
    """Return token ids as a list. A set has no order, bytes are a text, and a bool is not an id.

    Raises:
        ConfigError: they are not token ids; the message is `law` and the value.
    """
    is_list = isinstance(value, Sequence) or hasattr(value, "ndim")  # or an array, or a tensor
    tokens = cast("Sequence[int]", value)
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        if is_list and not isinstance(value, bytes | bytearray | memoryview):
            kinds = set(map(type, tokens))  # few: a look at each token costs milliseconds
            if kinds == {int}:
                return list(tokens)
            if not any(issubclass(kind, bool) for kind in kinds):
                return [operator.index(token) for token in tokens]
    raise ConfigError(f"{law}, got {shown(value)}")


#: Types of a message's parts that have a text.
_PARTS = ("text", "refusal")


def _text_of_parts(name: str, parts: Sequence[object]) -> str:
    """Join the text parts of a message's content; parts are as in OpenAI's chat interface."""
    texts = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = _text_of_part(part)
        if kind not in _PARTS or not isinstance(text, str):
            problem = f"the type {shown(kind)}" if kind not in (None, *_PARTS) else shown(part)
            raise ConfigError(
                f"part {number} of the content of {name} is {problem}: only text can be read, as "
                "{'type': 'text', 'text': '...'}"
            )
        texts.append(text)
    return "".join(texts)


def _is_thought(part: object) -> bool:
    """Return whether a message's part has thoughts, as in Mistral's chat interface."""
    return isinstance(part, Mapping) and part.get("type") == "thinking"


def _thoughts_of_parts(name: str, parts: Sequence[object]) -> str:
    """Join the thoughts among the parts of a message's content: texts, or lists of text parts."""
    texts = []
    for number, part in enumerate(parts):
        if not isinstance(part, Mapping) or not _is_thought(part):
            continue
        value = part.get("thinking")
        if isinstance(value, list | tuple):
            value = _text_of_parts(f"the thoughts in part {number} of {name}", value)
        if not isinstance(value, str):
            raise ConfigError(
                f"part {number} of the content of {name} is {shown(part)}: thoughts are read as "
                "{'type': 'thinking', 'thinking': '...'}"
            )
        texts.append(value)
    return "".join(texts)


def _text_of_part(part: object) -> object:
    """Return the text of a message's part, or None if it has none."""
    if not isinstance(part, Mapping):
        return None
    return part.get("refusal" if part.get("type") == "refusal" else "text")


def num_characters(prompt: Prompt) -> int:
    """Return the characters of a text, or of a chat's contents and calls; 0 = token ids."""
    if isinstance(prompt, str):
        return len(prompt)
    texts: list[object] = []
    for message in prompt:
        if not isinstance(message, Mapping):
            continue
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, Mapping) else None
            texts.append(function.get("arguments") if isinstance(function, Mapping) else None)
        content = message.get("content")
        parts = content if isinstance(content, list | tuple) else [{"text": content}]
        texts += map(_text_of_part, parts)
    return sum(len(text) for text in texts if isinstance(text, str))


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{name} is no valid text: a lone surrogate at position {error.start}"
        ) from None


def _check_texts(name: str, value: object) -> None:
    """Raise `ConfigError` for a lone surrogate in any string of plain data."""
    values, seen = [value], set[int]()  # a container may hold itself
    while values:
        part = values.pop()
        if isinstance(part, str):
            _check_text(f"a string of {name}", part)
        elif id(part) in seen:
            continue
        elif isinstance(part, Mapping):
            values += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple):
            values += part
        seen.add(id(part))


def is_chat(prompt: object) -> bool:
    """Return whether a prompt is a list with messages."""
    return isinstance(prompt, list | tuple) and any(
        issubclass(kind, Mapping) for kind in set(map(type, prompt))
    )
