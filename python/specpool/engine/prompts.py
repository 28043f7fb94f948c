"""`Prompts`: makes requests of prompts and parameters, and checks all before any is queued."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from specpool._core import Shape
from specpool.checks import check_int
from specpool.errors import ConfigError
from specpool.models import TargetModel
from specpool.sampling_params import SamplingParams
from specpool.scheduler.requests.conversation import Conversation, Message, Said, common_len
from specpool.scheduler.requests.latency import Times
from specpool.scheduler.requests.request import Request
from specpool.scheduler.scheduler import Scheduler
from specpool.text.chat_template import TemplateError, render
from specpool.text.stream import TextStream
from specpool.text.structured.compiler import Compiler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: A text, token ids, or the messages of a chat.
Prompt = str | Sequence[int] | Sequence[Message]


class Prompts:
    """A maker of requests that fit the engine."""

    def __init__(
        self,
        target: TargetModel,
        tokenizer: PreTrainedTokenizerBase | None,
        scheduler: Scheduler,
        *,
        shape: Shape,
        shapes: Sequence[Shape],
        num_pages: Sequence[int],
        max_context_len: int,
        compiler: Compiler,
    ) -> None:
        """Keep the limits that prompts and parameters are checked against.

        Args:
            target: gives the vocabulary size and the tokens that end a text.
            tokenizer: None = prompts are token ids.
            scheduler: decides whether a request can ever fit.
            shape: the shape of a request that names none.
            shapes: the ledger's shapes.
            num_pages: the pages of each group.
            max_context_len: the most tokens of a sequence.
            compiler: compiles the forms of texts.
        """
        self._target, self._tokenizer, self._scheduler = target, tokenizer, scheduler
        self._shape, self._shapes = shape, list(shapes)
        self._num_pages, self._max_context_len = list(num_pages), max_context_len
        self._ids = itertools.count(1)
        self._compiler = compiler

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        shape: Shape | Sequence[Shape] | None,
        priority: int,
    ) -> list[Request]:
        """Make a request for each sample of each prompt; nothing is queued yet.

        Raises:
            ConfigError: a prompt or a parameter cannot work.
        """
        self.check_open()
        several = _several(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(several)
        if not isinstance(params, Sequence) or any(
            not isinstance(p, SamplingParams) for p in params
        ):
            raise ConfigError(f"params must be SamplingParams or a list of it, got {params!r:.80}")
        if len(params) != len(several):
            raise ConfigError(f"{len(several)} prompts, but {len(params)} sampling parameters")
        shapes = self._shapes_of(shape, len(several))
        check_int("priority", priority, -(1 << 31), (1 << 31) - 1)
        requests = []
        for index, (prompt, p, own) in enumerate(zip(several, params, shapes, strict=True)):
            ids = self._encode(index, prompt)
            if not ids:
                raise ConfigError(f"prompt {index} is empty")
            first = self._request(f"prompt {index}", index, ids, p, own, priority)
            first.siblings = [self._sibling(first, sample) for sample in range(1, p.n)]
            requests += [first, *first.siblings]
        return requests

    def turn(
        self,
        conversation: Conversation,
        prompt: Prompt,
        params: SamplingParams | None,
        shape: Shape | None,
        priority: int,
        max_tokens: int,
    ) -> Request:
        """Make the request of a conversation's next turn; nothing is queued yet.

        Raises:
            ConfigError: a prompt or a parameter cannot work, or the turn exceeds `max_tokens`.
        """
        self.check_open()
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ConfigError(f"params must be SamplingParams or None, got {params!r:.80}")
        if params.n > 1:
            raise ConfigError(f"a turn has one sample, got n={params.n}: fork the session")
        (own,) = self._shapes_of(shape, 1)
        check_int("priority", priority, -(1 << 31), (1 << 31) - 1)
        history, said = conversation.tokens, conversation.said
        messages: tuple[Message, ...] | None = None
        if _is_chat(prompt):
            messages = tuple(self._messages(0, cast("Sequence[Message]", prompt)))
            ids, said = self._go_on(conversation, messages)
        else:
            ids = [*history, *self._encode(0, prompt, goes_on=bool(history))]
        if not ids:
            raise ConfigError("the session's first turn is empty")
        if len(ids) >= max_tokens:
            raise ConfigError(
                f"the session has {len(history)} tokens and gets {len(ids) - len(history)}; with "
                f"one new token at least, its limit of {max_tokens} leaves room for "
                f"{max(max_tokens - len(history) - 1, 0)}"
            )
        request = self._request("the turn", 0, ids, params, own, priority, max_tokens)
        request.conversation, request.said, request.messages = conversation, said, messages
        return request

    def check_open(self) -> None:
        """Raise `ConfigError` if the engine or its target model has been closed."""
        if self._target.closed:
            raise ConfigError("the engine, or its target model, has been closed: make a new one")

    def _shapes_of(
        self, shape: Shape | Sequence[Shape] | None, num_prompts: int
    ) -> list[Shape | None]:
        """Return a shape for each prompt; None = the engine's."""
        shapes: list[Shape | None]
        if shape is None or isinstance(shape, Shape):
            shapes = [shape] * num_prompts
        elif isinstance(shape, Sequence) and len(shape) == num_prompts:
            shapes = list(shape)
        else:
            raise ConfigError(
                f"shape must be a Shape, or one for each of {num_prompts} prompts: {shape!r:.80}"
            )
        for one in shapes:
            if one is not None and one not in self._shapes:
                raise ConfigError(f"{one} is not among the engine's shapes {self._shapes}")
        return shapes

    def _sibling(self, first: Request, sample: int) -> Request:
        """Make a further sample of the same prompt; its seed is the first's seed + `sample`."""
        return dataclasses.replace(
            first,
            request_id=next(self._ids),
            sample=sample,
            tokens=list(first.tokens),
            seed=(first.seed + sample) % (1 << 64),
            watch=TextStream(self._tokenizer, first.params.stop) if first.watch else None,
            matcher=first.matcher.fresh() if first.matcher else None,
            forced=[],
            forwards=[],
            logprobs=[],
            siblings=[],
            times=Times(),
        )

    def _request(
        self,
        name: str,
        index: int,
        ids: list[int],
        params: SamplingParams,
        shape: Shape | None,
        priority: int,
        max_tokens: int | None = None,
    ) -> Request:
        vocab_size, longest = self._target.vocab_size, self._max_context_len
        for position, token in enumerate(ids):
            if not 0 <= token < vocab_size:
                raise ConfigError(
                    f"{name} has token id {token} at position {position}; "
                    f"the vocabulary is [0, {vocab_size})"
                )
        if len(ids) >= longest:
            raise ConfigError(
                f"{name} has {len(ids)} tokens; with one new token at least, "
                f"max_context_len {longest} leaves room for {longest - 1}"
            )
        self._check_ids(name, params)
        most_steps, choices, rounds = params.max_draft_steps, None, self._scheduler.round_shapes
        if shape is None:
            shape, shape_index, choices = rounds.allowed(self._shape, most_steps)
        else:
            shape_index = self._shapes.index(shape)
            if most_steps is not None and shape.num_steps > most_steps:
                raise ConfigError(f"{name} asks for {shape}, and for {most_steps} steps at most")
        matcher, forced = None, 0
        if params.structured is not None:
            matcher = self._compiler.matcher(params.structured)
            given = shape_index, choices, most_steps
            shape_index, choices, forced = rounds.with_forced(*given)
        eos = frozenset[int]() if params.ignore_eos else self._target.eos_token_ids
        request = Request(
            request_id=next(self._ids),
            index=index,
            prompt_len=len(ids),
            tokens=ids,
            params=params,
            shape=shape,
            shape_index=shape_index,
            choices=choices,
            max_len=min(len(ids) + params.max_new_tokens, max_tokens or longest),
            stop_ids=eos | frozenset(params.stop_token_ids),
            seed=fresh_seed() if params.seed is None else params.seed,
            priority=priority,
            watch=TextStream(self._tokenizer, params.stop) if params.stop else None,
            matcher=matcher,
            forced_shape=forced,
        )
        if not self._scheduler.fits(request):
            most = self._scheduler.pages_at_most(request).tolist()
            raise ConfigError(
                f"{name} needs {most} pages when it is {request.max_len} tokens long, the "
                f"groups have {self._num_pages}: lower max_new_tokens"
            )
        return request

    def _check_ids(self, name: str, params: SamplingParams) -> None:
        """Raise `ConfigError` for parameters that the vocabulary cannot fulfil."""
        vocab_size = self._target.vocab_size
        for token in params.logit_bias:
            if token >= vocab_size:
                raise ConfigError(
                    f"{name} has {token} in its logit_bias, which no token can be; the vocabulary "
                    f"is [0, {vocab_size})"
                )
        for token in params.stop_token_ids:
            if token >= vocab_size:
                raise ConfigError(
                    f"{name} has {token} among its stop_token_ids, which no token can be; the "
                    f"vocabulary is [0, {vocab_size})"
                )
        if params.logprobs is not None and params.logprobs > vocab_size:
            raise ConfigError(
                f"{name} asks for logprobs of {params.logprobs} tokens; the vocabulary has "
                f"{vocab_size}"
            )

    def _encode(self, index: int, prompt: Prompt, *, goes_on: bool = False) -> list[int]:
        """Return the prompt's token ids; if `goes_on`, without those that begin a text."""
        if _is_chat(prompt):
            messages = self._messages(index, cast("Sequence[Message]", prompt))
            return self._ids_of(self._render(index, messages))
        if not isinstance(prompt, str):
            try:
                return [operator.index(token) for token in cast("Sequence[int]", prompt)]
            except (TypeError, ValueError, RuntimeError):
                raise ConfigError(
                    f"prompt {index} must be a string or integer token ids, got {prompt!r:.80}"
                ) from None
        if self._tokenizer is None:
            raise ConfigError(
                f"prompt {index} is a string, but the target has no tokenizer: give token ids"
            )
        _check_text(f"prompt {index}", prompt)
        return list(self._tokenizer.encode(prompt, add_special_tokens=not goes_on))

    def _messages(self, index: int, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return a copy of a chat's messages, checked, with each content as one string."""
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
                raise ConfigError(f"{name} must be a dict, got {message!r:.80}")
            copy = dict(message)
            if isinstance(message.get("content"), list | tuple):
                copy["content"] = _text_of_parts(name, message["content"])
            for key in ("role", "content"):
                if not isinstance(copy.get(key), str):
                    raise ConfigError(f"{name} needs a string as {key!r}, got {message!r:.80}")
                _check_text(f"{key!r} of {name}", copy[key])
            copies.append(copy)
        return copies

    def _render(self, index: int, messages: Sequence[Message]) -> str:
        """Render a chat with the tokenizer's template, up to where the answer begins."""
        from transformers import PreTrainedTokenizerBase

        tokenizer = self._tokenizer
        assert tokenizer is not None
        try:
            if type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template:
                template = tokenizer.get_chat_template()
                return render(template, messages, tokenizer.special_tokens_map)
            # A tokenizer class with its own `apply_chat_template` renders by itself.
            return str(
                tokenizer.apply_chat_template(
                    cast("list[dict[str, str]]", list(messages)),
                    add_generation_prompt=True,
                    tokenize=False,
                )
            )
        except TemplateError as error:
            raise ConfigError(f"the chat template refuses prompt {index}: {error}") from error
        except Exception as error:  # a tokenizer's own code may raise anything
            raise ConfigError(
                f"the chat template refuses prompt {index}: {type(error).__name__}: {error}"
            ) from error

    def _go_on(
        self, conversation: Conversation, new: tuple[Message, ...]
    ) -> tuple[list[int], list[Said]]:
        """Tokenize the next turn of a chat; also return where each earlier turn ends now.

        If the rendered chat begins with the text of the session's tokens, these tokens are kept.
        Tokenizing an answer again could give other ids, and the KV of the answer would be lost. If
        the text differs, for example because the template leaves out an answer's thoughts, the
        whole chat is tokenized again.
        """
        said, start = conversation.said, 0
        old: list[Message] = []
        for turn in said:
            if turn.messages is None:
                raise ConfigError(
                    f"the session's tokens from {start} on are text or token ids, not a chat: go "
                    f"on with the like, or rewind to {start}"
                )
            old += [*turn.messages, self._answer(turn)]
            start = turn.end
        kept = conversation.tokens[:start]  # without the part of a turn that a rewind has left
        text = self._render(0, [*old, *new])
        own = self._text_of(kept)
        if text.startswith(own):
            ids = [*kept, *self._ids_of(text[len(own) :])]
            if self._text_of(ids) == text:
                return ids, said
        ids = self._ids_of(text)
        same = common_len(kept, ids)
        if same == start:
            return ids, said
        # The old turns end where the tokens begin to depend on the new message: render the chat
        # with another message in its place, and see where the texts part.
        other = "-" if new[0]["content"].strip()[:1] != "-" else "+"
        others = self._render(0, [*old, {**new[0], "content": other}])
        end = common_len(self._ids_of(text[: common_len(text, others)]), ids)
        return ids, [
            dataclasses.replace(turn, end=max(same, end)) if turn.end > same else turn
            for turn in said
        ]

    def _answer(self, turn: Said) -> Message:
        """Return the model's answer of a turn, as a chat message."""
        text = TextStream(self._tokenizer, turn.stop).push(turn.answer_ids, last=True)
        return {"role": "assistant", "content": text}

    def _text_of(self, ids: list[int]) -> str:
        """Decode tokens to text, special tokens included."""
        assert self._tokenizer is not None
        text = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _ids_of(self, text: str) -> list[int]:
        """Tokenize a text without the special tokens that begin one."""
        assert self._tokenizer is not None
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _text_of_parts(name: str, parts: Sequence[object]) -> str:
    """Join the text parts of a message's content; parts are as in OpenAI's chat interface."""
    texts = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            shown = f"the type {kind!r}" if kind not in (None, "text") else f"{part!r:.80}"
            raise ConfigError(
                f"part {number} of the content of {name} is {shown}: only text can be read, as "
                "{'type': 'text', 'text': '...'}"
            )
        texts.append(text)
    return "".join(texts)


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{name} is no valid text: a lone surrogate at position {error.start}"
        ) from None


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, list | tuple) and any(isinstance(item, Mapping) for item in prompt)


def _several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return a list of prompts; one prompt alone becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        several = [prompts[i] for i in range(len(prompts))]
    except (TypeError, KeyError, IndexError):
        raise ConfigError(
            f"prompts must be a string, token ids, or a list of them, got {prompts!r:.80}"
        ) from None
    if _is_chat(several):
        return [cast("Sequence[Message]", several)]
    # The items of an integer array are 0-dimensional arrays, which have `__index__` as ints do.
    if several and not isinstance(several[0], str) and hasattr(several[0], "__index__"):
        if getattr(several[0], "ndim", 0) == 0:
            return [cast("Sequence[int]", several)]
    return cast("Sequence[Prompt]", several)


def fresh_seed() -> int:
    """Draw a random 64-bit seed for a request that names none."""
    return secrets.randbits(64)
