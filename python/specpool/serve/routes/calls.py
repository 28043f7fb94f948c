"""What chats and completions share: from a body to its texts, and back to an answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from specpool.engine.sampling_params import SamplingParams
from specpool.engine.texts import NextTurn, Prompt, is_chat, num_characters
from specpool.errors import ConfigError
from specpool.serve.answers import EventStream, watched
from specpool.serve.api.choice import AnswerChoice, Delta
from specpool.serve.api.errors import ApiError, bad, event, to_json, too_long
from specpool.serve.api.requests import GenerationBody as Body
from specpool.serve.api.sampling import ignored_header, refused
from specpool.serve.api.structured import form_field
from specpool.serve.api.usage import drafting_of, usage_of
from specpool.serve.generation import Generation, Order, tokens_of
from specpool.serve.service import Service
from specpool.serve.sessions import SessionRecord, ident_of

#: What a call for texts answers, for the OpenAPI document.
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The texts, or with `stream` their parts as server-sent events",
        "content": {"application/json": {"schema": {}}, "text/event-stream": {"schema": {}}},
    }
}


#: Fields that would put something else between the turns of a session.
_NOT_IN_SESSIONS = ("add_special_tokens", "add_generation_prompt", "continue_final_message")
#: Prompts of at most this many characters in all are tokenized without a thread, which costs more.
_SHORT = 2048
#: Answers with at most this many tokens' log probabilities are written without a thread.
_FEW_LOGPROBS = 128


class Form(Protocol):
    """An answer's form: a chat's or a completion's."""

    def first(self, choice: AnswerChoice) -> dict[str, Any] | None:
        """Return the part of a stream that comes before a choice's text; None if there is none."""

    def part(self, choice: AnswerChoice, delta: Delta) -> dict[str, Any] | None:
        """Return a choice's part of a stream; None if nothing is certain yet."""

    def whole(self, choice: AnswerChoice, deltas: list[Delta]) -> dict[str, Any]:
        """Return a choice of an answer in one piece."""


@dataclass(slots=True)
class Call:
    """One HTTP call for texts."""

    service: Service
    request: Request
    body: Body
    model: str
    ignored: list[str]
    arrived: float = field(default_factory=time.perf_counter)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer: the fields of the request that were ignored."""
        return ignored_header(self.ignored)

    @property
    def key_id(self) -> str:
        """The id of the key that calls."""
        return str(self.request.scope["specpool.key"])

    async def take_session(self) -> SessionRecord | None:
        """Take the session that the call names, if it does.

        Raises:
            ApiError: it is not there, busy, or has another length.
        """
        ident = self.request.headers.get("x-session-id")
        if ident is None:
            if self.body.session_id is not None:
                raise ApiError(
                    400,
                    "name the session in the header x-session-id: servers in front of this one "
                    "choose by it",
                    code="session_header_missing",
                    param="session_id",
                )
            if self.body.session_offset is not None:
                raise bad("session_offset needs the header x-session-id", "session_offset")
            return None
        if (self.body.n or 1) > 1:
            raise bad("a turn of a session has one text: fork the session", "n")
        for name in _NOT_IN_SESSIONS:
            if getattr(self.body, name, None) is not None:
                raise bad(f"{name} does not go with a session, whose turns follow each other", name)
        ident = ident_of(ident, self.key_id)
        await self.service.sessions.reach(ident)
        return self.service.sessions.begin(ident, self.body.session_offset)

    async def tokenized(
        self, prompts: list[Prompt], record: SessionRecord | None, variables: Mapping[str, Any]
    ) -> list[list[int] | NextTurn]:
        """Tokenize the prompts, beside the event loop.

        Raises:
            ApiError: the tokenizer or its template refuses one.
        """
        service = self.service

        def work() -> list[list[int] | NextTurn]:
            tokens: list[list[int] | NextTurn]
            if record is not None:
                (prompt,) = prompts
                tokens = [service.sessions.turn(record, service.texts, prompt, variables)]
            else:
                tokens = [
                    service.texts.encode(
                        index,
                        prompt,
                        adds_special=self.body.add_special_tokens,
                        variables=variables,
                    )
                    for index, prompt in enumerate(prompts)
                ]
            if is_chat(prompts[0]):
                service.texts.chat_ends()  # here, because the first call takes a moment
            return tokens

        # A thread pays for long texts and for chats, whose template may take a while.
        is_short = record is None and all(
            not isinstance(prompt, list) or all(type(part) is int for part in prompt)
            for prompt in prompts
        )
        is_short = is_short and sum(map(len, prompts)) <= _SHORT
        try:
            tokens = work() if is_short else await service.aside(work)
        except ConfigError as error:
            raise refused(error) from None
        if record is None and not all(tokens):
            raise bad("a prompt is empty", "prompt")
        return tokens

    async def generation(
        self,
        prompts: list[Prompt],
        params_of: Callable[[int], SamplingParams],
        variables: Mapping[str, Any],
        *,
        notes_special: bool = False,
    ) -> Generation:
        """Return the call's texts, ready to start.

        Args:
            prompts: the prompts; in a session, what is new.
            params_of: returns the parameters for the room that is left, in tokens.
            variables: further variables of the chat template.
            notes_special: the answer's form needs the special tokens beside the texts.

        Raises:
            ApiError: something cannot work.
        """
        record = await self.take_session()
        ready = self.service.client.ready
        max_tokens = ready.max_context_len if record is None else record.max_tokens
        try:
            self.check_sizes(prompts, max_tokens)
            tokens = await self.tokenized(prompts, record, variables)
            lens = [len(tokens_of(prompt)) for prompt in tokens]
            room = min(self.room(num, max_tokens, index) for index, num in enumerate(lens))
            params = self.service.keys.salted(self.key_id, params_of(room))
            if is_chat(prompts[0]):
                params = self.service.texts.chat_params(
                    params, ready.eos_token_ids, ready.vocab_size
                )
            order = Order(tokens, params, self.body.priority or 0, record, notes_special)
            return Generation(self.service, order, self.arrived)
        except BaseException as error:
            if record is not None:
                self.service.sessions.release(record)
            if isinstance(error, ApiError):
                raise self._with_param_of_request(error) from None
            raise

    def check_sizes(self, prompts: list[Prompt], max_tokens: int) -> None:
        """Refuse what cannot fit, whatever its tokens are, before it costs anything.

        Raises:
            ApiError: a prompt is too long for `max_tokens` tokens.
        """
        for index, prompt in enumerate(prompts):
            if is_chat(prompt) or isinstance(prompt, str):
                self.service.check_characters(num_characters(prompt), f"prompt[{index}]")
            else:
                self.room(len(prompt), max_tokens, index)

    def room(self, num_tokens: int, max_tokens: int, index: int) -> int:
        """Return how many tokens the prompt of this index leaves room for.

        Raises:
            ApiError: it leaves none.
        """
        if num_tokens >= max_tokens:
            raise too_long(
                f"the prompt has {num_tokens} tokens; with one new token at least, the limit of "
                f"{max_tokens} leaves room for {max_tokens - 1}",
                f"prompt[{index}]",
            )
        return max_tokens - num_tokens

    async def answer(
        self, generation: Generation, make_form: Callable[[], Form], kind: str, prefix: str
    ) -> Response:
        """Run the texts, and answer: in one piece, or as a stream.

        Args:
            generation: the texts; closed at the end, however it comes.
            make_form: makes the answer's form.
            kind: the answer's `object`.
            prefix: begins the answer's id.

        Raises:
            ApiError: the texts cannot run, or have failed.
        """
        head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }
        try:
            form = make_form()
            generation.submit()
            self.request.scope["specpool.arrived"]()
            work = self._stream if self.body.stream else self._whole
            answer = await watched(self.request, work(generation, form, head))
        except ApiError as error:
            generation.close()
            raise self._with_param_of_request(error) from None
        except BaseException:
            generation.close()
            raise
        if answer is None:  # nobody reads it
            generation.close()
            return Response(status_code=499)
        return answer

    def _with_param_of_request(self, error: ApiError) -> ApiError:
        """Return an error with the field that this request has for the text or its form."""
        fields = error.body["error"]
        if fields["param"] == "response_format":
            fields["param"] = form_field(self.body)
        if (fields["param"] or "").startswith("prompt["):
            prompt = getattr(self.body, "prompt", None)
            if not isinstance(prompt, list) or not isinstance(prompt[0], str | list):
                fields["param"] = "prompt" if hasattr(self.body, "prompt") else "messages"
        return error

    async def _stream(self, generation: Generation, form: Form, head: dict[str, Any]) -> Response:
        await generation.accepted()
        events = self._events(generation, form, head)
        return EventStream(events, generation.close, self.headers)

    async def _whole(self, generation: Generation, form: Form, head: dict[str, Any]) -> Response:
        deltas: list[list[Delta]] = [[] for _ in generation.choices]
        await generation.accepted()
        async for choice, delta in generation.deltas():
            deltas[choice.index].append(delta)

        def write() -> bytes:
            # One choice after another: to encode all at once would keep the interpreter's lock.
            pairs = zip(generation.choices, deltas, strict=True)
            return b",".join(to_json(form.whole(*pair)) for pair in pairs)

        num_logprobs = sum(len(delta.entries) for parts in deltas for delta in parts)
        is_short = num_logprobs <= _FEW_LOGPROBS
        choices = write() if is_short else await self.service.write_aside(write)
        # After `whole`, which gives a turn its message; the session's new length is in the answer.
        generation.close()
        end = self._end(generation)
        parts = (to_json(head)[:-1], b',"choices":[', choices, b"],", to_json(end)[1:])
        return Response(b"".join(parts), headers=self.headers, media_type="application/json")

    async def _events(
        self, generation: Generation, form: Form, head: dict[str, Any]
    ) -> AsyncIterator[bytes]:
        options = self.body.stream_options
        counts = options is not None and options.include_usage
        always = options is not None and options.continuous_usage_stats
        drafts = bool(self.body.include_drafts)
        num_prompt = generation.order.num_prompt

        def chunk(choice: dict[str, Any], delta: Delta | None = None) -> bytes:
            more: dict[str, Any] = {}
            if counts:
                now = usage_of(num_prompt, generation.choices) if always else None
                more["usage"] = now
            if drafts and delta is not None and delta.pieces:
                more["drafts"] = delta.pieces
            return event(head | {"choices": [choice]} | more)

        firsts = [form.first(choice) for choice in generation.choices]
        if begun := b"".join(chunk(first) for first in firsts if first is not None):
            yield begun
        try:
            async for choice, delta in generation.deltas():
                part = form.part(choice, delta)
                if part is not None:
                    yield chunk(part, delta)
        except ApiError as error:
            raise self._with_param_of_request(error) from None
        generation.close()
        end = self._end(generation)
        usage = end.pop("usage")
        if counts:
            end["usage"] = usage
        last = event(head | {"choices": []} | end) if counts or "session" in end else b""
        yield last + b"data: [DONE]\n\n"

    def _end(self, generation: Generation) -> dict[str, Any]:
        """Return the fields of an answer beside its choices."""
        end: dict[str, Any] = {"usage": usage_of(generation.order.num_prompt, generation.choices)}
        done = generation.choices[0].done
        if len(generation.choices) == 1 and done is not None:  # of several texts it would be mixed
            num_steps = self.service.client.ready.config["speculative_num_steps"]
            end["metrics"] = {"speculative_decoding": drafting_of(done, num_steps)}
        record = generation.order.session
        if record is not None:
            end["session"] = {"id": record.public_id, "offset": record.offset}
        return end
