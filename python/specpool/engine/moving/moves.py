"""`Moves`: sessions and requests that leave for another engine, or come from one.

What leaves is an image: the text, its state, and the pages of target and draft KV. A transfer is
a copy of these bytes by any means (docs/transfer.md). If it fails on the way, the sender takes the
row back. If a peer is lost, the text is prefilled. Half a row is nothing on either side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specpool._core import Ledger, Shape
from specpool.checks import shown
from specpool.engine.core import EngineCore, OnItem
from specpool.engine.moving.arrivals import Arrival
from specpool.engine.session import Session
from specpool.errors import ConfigError, TransferError
from specpool.memory.page_bytes import PageBytes
from specpool.sampling_params import SamplingParams
from specpool.scheduler.requests.conversation import Conversation, Message, Said
from specpool.scheduler.requests.request import Request, TokenLogprob
from specpool.scheduler.rows.exports import RowExport
from specpool.text.structured.grammar import Grammar
from specpool.transfer.image import Bytes, Image, Run, Told, Writer
from specpool.transfer.layout import Layout

_PARAMS = [field.name for field in dataclasses.fields(SamplingParams)]


class Export:
    """A session or request on its way out. End it by `arrived` or `give_back`.

    As a context manager it gives back what has not arrived. Until the end the session takes no
    turns, and the request does not run; other requests go on, also while `write` runs.
    """

    def __init__(
        self,
        core: EngineCore,
        pages: PageBytes,
        row: RowExport,
        writer: Writer,
        owner: Conversation | Request,
    ) -> None:
        """Hold the pages of `row`; most callers want `Engine.export`."""
        self._core, self._pages, self._row = core, pages, row
        self._writer, self._owner = writer, owner
        self._is_over = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the image."""
        return self._writer.num_bytes

    @property
    def length(self) -> int:
        """Tokens whose KV goes along; the receiver prefills the others."""
        return self._row.length

    def write(self, image: Bytes, told: Told | None = None) -> None:
        """Write the image, uint8 [num_bytes]; `told` hears what is there: see `Writer.write`.

        Raises:
            ConfigError: the export is over, or `image` has another size.
        """
        if self._is_over:
            raise ConfigError("the export is over: its pages belong to others")
        if image.shape != (self.num_bytes,) or image.dtype != np.uint8:
            raise ConfigError(
                f"image must be uint8 [{self.num_bytes}], got {image.dtype} {list(image.shape)}"
            )
        self._writer.write(image, self._read, told)

    def image(self) -> Bytes:
        """Return the image in memory of its own."""
        image = np.empty(self.num_bytes, np.uint8)
        self.write(image)
        return image

    def arrived(self) -> None:
        """End the session or request here, because another engine has it. Again: nothing."""
        if self._is_over:
            return
        self._is_over, scheduler = True, self._core.scheduler
        with self._core.lock, self._core.loop.recovering():
            scheduler.exports.arrived(self._row)
            if isinstance(self._owner, Conversation):
                self._owner.leaves = False
                scheduler.conversations.close(self._owner)
            else:
                scheduler.abort(self._owner, "moved")
                if (conversation := self._owner.conversation) is not None:
                    conversation.leaves = False
                    scheduler.conversations.close(conversation)

    def give_back(self) -> None:
        """Let the session or request go on here. After the end it does nothing."""
        if self._is_over:
            return
        self._is_over, exports = True, self._core.scheduler.exports
        with self._core.lock, self._core.loop.recovering():
            if isinstance(self._owner, Conversation):
                exports.return_conversation(self._row, self._owner)
            else:
                if (conversation := self._owner.conversation) is not None:
                    conversation.leaves = False
                exports.return_request(self._row, self._owner)

    def _read(self, run: Run, out: Bytes) -> int:
        pages = self._row.pages[run.group][run.place]
        with self._core.lock:  # one forward or copy at a time; others run between the runs
            return self._pages.read(run.group, pages, out)

    def __enter__(self) -> Export:
        """Return the export itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give back what has not arrived."""
        self.give_back()


class Moves:
    """The exports and imports of an engine."""

    def __init__(
        self, core: EngineCore, ledger: Ledger, pages: PageBytes, layout: Layout, *, takes_kv: bool
    ) -> None:
        """Move rows of `ledger`, whose pages `pages` reads and writes.

        Args:
            core: runs the sessions and requests.
            ledger: has their rows.
            pages: reads and writes the pages.
            layout: of the rows.
            takes_kv: whether KV goes along; else the text goes alone.
        """
        self._core, self._ledger, self._pages, self.layout = core, ledger, pages, layout
        self._takes_kv = takes_kv

    def export_session(self, session: Session) -> Export:
        """Take a session out, with its turn if one waits or runs; see `Engine.export`."""
        core = self._core
        core.loop.drain()  # a round of a turn may be under way, and may end it
        conversation, turn = session.leaving()
        state: dict[str, Any] = {"kind": "session", "max_tokens": session.max_tokens}
        state["said"] = [_said_state(said) for said in conversation.said]
        if turn is not None:
            return self._export_turn(turn, conversation, state)
        with core.loop.recovering():
            try:
                row = core.scheduler.exports.of_conversation(conversation)
                return self._export(row, conversation.tokens, state, conversation)
            except BaseException:
                conversation.leaves = False
                raise

    def _export_turn(
        self, turn: Request, conversation: Conversation, state: dict[str, Any]
    ) -> Export:
        """Take a session out with the turn that waits or runs: its row, if it has one."""
        core = self._core
        _check_moves(turn)
        said, messages = [_said_state(each) for each in turn.said], _messages_state(turn.messages)
        state["turn"] = _request_state(turn) | {"said": said, "messages": messages}
        state["history"] = conversation.tokens
        with core.loop.recovering():
            conversation.leaves = True
            try:
                row = core.scheduler.exports.of_request(turn, takes_kv=self._takes_kv)
                return self._export(row, turn.tokens, state, turn)
            except BaseException:
                conversation.leaves = False
                raise

    def export_request(self, request: Request) -> Export:
        """Take a submitted request out; see `Engine.export`."""
        core = self._core
        core.loop.drain()
        if request.conversation is not None:
            raise ConfigError(
                f"request {request.request_id} is a turn of session "
                f"{request.conversation.number}: export the session"
            )
        _check_moves(request)
        with core.loop.recovering():
            # Samples that wait for their prompt's pages run by themselves, or move one by one.
            core.scheduler.exports.part(core.first_sample(request))
            row = core.scheduler.exports.of_request(request, takes_kv=self._takes_kv)
            return self._export(row, request.tokens, _request_state(request), request)

    def _export(
        self,
        row: RowExport,
        tokens: list[int],
        state: Mapping[str, Any],
        owner: Conversation | Request,
    ) -> Export:
        writer = Writer(
            self.layout,
            length=row.length,
            drafted_len=row.drafted_len,
            tokens=tokens,
            state=state,
        )
        return Export(self._core, self._pages, row, writer, owner)

    def take_in(
        self,
        image: Image,
        on_item: OnItem | None,
        decode: bool,
        on_arrival: Callable[[Session | int], None],
    ) -> Session | int:
        """Take a session or request in; see `Engine.import_row` and `Engine.take_in`.

        Hold no lock: the engine runs between two runs of pages.
        """
        enter = self._enter(image, on_item, decode)
        core, is_idle = self._core, image.state["kind"] == "session" and "turn" not in image.state
        takes_kv = core.scheduler.prefix_cache.is_on or is_idle
        with core.lock, core.loop.recovering():
            arrival = Arrival(core, self._ledger, self._pages, image, takes_kv)
        try:
            arrival.read()
            with core.lock:
                with core.loop.recovering():
                    found = enter(arrival)
                on_arrival(found)
            return found
        except BaseException:
            with core.lock, core.loop.recovering():
                arrival.end()
            raise

    def _enter(
        self, image: Image, on_item: OnItem | None, decode: bool
    ) -> Callable[[Arrival], Session | int]:
        """Check the state of an image; return what makes a session or request of its row."""
        core, kind = self._core, image.state.get("kind")
        if kind == "session":
            max_tokens = min(_number(image.state, "max_tokens", 2), self.layout.max_context_len)
            if "turn" in image.state:
                return self._enter_turn(image, on_item, decode, max_tokens)
            said = _said_of(image.state, len(image.tokens))
            core.prompts.check_tokens("the session", image.tokens)

            def enter_session(arrival: Arrival) -> Session:
                conversation = arrival.keep()
                conversation.said = said
                return Session(core, conversation, max_tokens)

            return enter_session
        if kind != "request":
            raise TransferError(f"the state is of kind {shown(kind)}: a session or a request moves")
        request = self._request_of(image.state, image.tokens)

        def enter_request(arrival: Arrival) -> int:
            # The KV waits in the prefix cache, where running requests may displace it.
            arrival.index(request.salt)
            return core.submit(request, on_item, decode)

        return enter_request

    def _enter_turn(
        self, image: Image, on_item: OnItem | None, decode: bool, max_tokens: int
    ) -> Callable[[Arrival], Session]:
        """Check the state of a session with its turn; return what makes them of its row."""
        core, turn, history = self._core, image.state["turn"], image.state.get("history")
        if not isinstance(turn, dict):
            raise TransferError(f"turn must be an object, got {shown(turn)}")
        if not isinstance(history, list) or any(type(n) is not int for n in history):
            raise TransferError(f"history must be token ids, got {shown(history)}")
        core.prompts.check_tokens("the session", history)
        said = _said_of(image.state, len(history))
        request = self._request_of(turn, image.tokens, max_tokens)
        request.said = _said_of(turn, request.prompt_len)
        request.messages = _messages_of(turn)

        def enter(arrival: Arrival) -> Session:
            arrival.index(request.salt)
            conversation = core.scheduler.conversations.new(history)
            conversation.said, request.conversation = said, conversation
            try:
                core.submit(request, on_item, decode)
            except BaseException:
                core.scheduler.conversations.close(conversation)
                raise
            return Session(core, conversation, max_tokens)

        return enter

    def _request_of(
        self, state: Mapping[str, Any], tokens: list[int], max_tokens: int | None = None
    ) -> Request:
        params = _params_of(state.get("params"))
        prompt_len = _number(state, "prompt_len", 1)
        if prompt_len > len(tokens):
            raise TransferError(f"prompt_len is {prompt_len} of {len(tokens)} tokens")
        forwards, flags = state.get("forwards"), state.get("shape")
        if not isinstance(forwards, list) or not all(type(n) is int and n for n in forwards):
            raise TransferError(f"forwards must be a list of lengths, got {shown(forwards)}")
        num_output = len(tokens) - prompt_len
        if sum(map(abs, forwards)) != num_output:
            raise TransferError(
                f"{len(forwards)} forwards gave {sum(map(abs, forwards))} tokens, the output has "
                f"{num_output}"
            )
        logprobs = _logprobs_of(state.get("logprobs"), params, num_output)
        priority = _number(state, "priority", -(1 << 31))
        seed = _number(state, "seed", 0)
        return self._core.prompts.moved(
            tokens,
            prompt_len,
            dataclasses.replace(params, seed=seed, n=1),
            _shape_of(flags, self._ledger),
            priority,
            [n for n in forwards if n > 0],
            [sum(map(abs, forwards[:i])) for i, n in enumerate(forwards) if n < 0],
            logprobs,
            max_tokens,
        )


def _check_moves(request: Request) -> None:
    """Raise `ConfigError` for a request that cannot move now."""
    number = request.request_id
    if request.finish_reason is not None:
        raise ConfigError(f"request {number} has ended: {request.finish_reason}")
    reasons = {
        "it pins its prompt": request.wants_pin,
        "its KV is on its way from the host": request.handle,
        "its KV may be wrong": request.tainted,
    }
    for why, holds in reasons.items():
        if holds:
            raise ConfigError(f"request {number} cannot be exported: {why}")


def _request_state(request: Request) -> dict[str, Any]:
    params = {name: getattr(request.params, name) for name in _PARAMS}
    params["logit_bias"] = list(request.params.logit_bias.items())
    form = request.params.structured  # the receiver follows the output through it
    params["structured"] = None if form is None else [form.kind, form.text]
    shape = request.shape
    named = [shape.num_steps, shape.topk, shape.num_draft_tokens]
    return {
        "kind": "request",
        "params": params,
        "prompt_len": request.prompt_len,
        "seed": request.seed,
        "priority": request.priority,
        "shape": None if request.choices is not None else named,
        "forwards": [n if is_verify else -n for n, is_verify in request.forwards()],
        "logprobs": [[e.token_id, e.logprob, list(e.top.items())] for e in request.logprobs],
    }


def _params_of(state: object) -> SamplingParams:
    if not isinstance(state, dict) or set(state) - set(_PARAMS):
        raise TransferError(f"params must be sampling parameters, got {state!r:.200}")
    try:
        bias, form = dict(state.get("logit_bias", [])), state.get("structured")
        grammar = None if form is None else Grammar(*form)
        return SamplingParams(**{**state, "logit_bias": bias, "structured": grammar})
    except (ConfigError, TypeError, ValueError) as error:
        raise TransferError(f"params of the request: {error!s:.200}") from None


def _logprobs_of(state: object, params: SamplingParams, num_output: int) -> list[TokenLogprob]:
    try:
        found = [
            TokenLogprob(int(token), float(logprob), {int(t): float(p) for t, p in top})
            for token, logprob, top in state  # type: ignore[attr-defined]
        ]
    except (TypeError, ValueError) as error:
        raise TransferError(f"logprobs of the request: {error!s:.200}") from None
    if len(found) != (0 if params.logprobs is None else num_output):
        raise TransferError(f"{len(found)} logprobs for {num_output} tokens")
    return found


def _shape_of(state: object, ledger: Ledger) -> Shape | None:
    """Return the shape that the request named, if this engine has it; else None."""
    for shape in ledger.shapes:
        if state == [shape.num_steps, shape.topk, shape.num_draft_tokens]:
            return shape
    return None


def _said_state(said: Said) -> dict[str, Any]:
    answer = {"answer_ids": said.answer_ids, "stop": list(said.stop)}
    return {"end": said.end, "messages": _messages_state(said.messages), **answer}


def _messages_state(messages: tuple[Message, ...] | None) -> list[dict[str, Any]] | None:
    return None if messages is None else [dict(message) for message in messages]


def _messages_of(turn: Mapping[str, Any]) -> tuple[Message, ...] | None:
    messages = turn.get("messages")
    if messages is None:
        return None
    if not (isinstance(messages, list) and all(isinstance(m, dict) for m in messages)):
        raise TransferError(f"messages must be those of a chat, got {shown(messages)}")
    return tuple(messages)


def _said_of(state: Mapping[str, Any], num_tokens: int) -> list[Said]:
    turns, least, found = state.get("said"), 0, []
    if not isinstance(turns, list):
        raise TransferError(f"said must be a list of turns, got {shown(turns)}")
    for turn in turns:
        if not isinstance(turn, dict):
            raise TransferError(f"a turn must be an object, got {shown(turn)}")
        end, ids, stop = _number(turn, "end", least), turn.get("answer_ids"), turn.get("stop")
        messages = _messages_of(turn)
        if end > num_tokens:
            raise TransferError(f"a turn of the session is wrong: {turn!r:.200}")
        if not (isinstance(ids, list) and all(type(n) is int for n in ids)):
            raise TransferError(f"answer_ids must be token ids, got {shown(ids)}")
        if not (isinstance(stop, list) and all(isinstance(s, str) for s in stop)):
            raise TransferError(f"stop must be strings, got {shown(stop)}")
        found.append(Said(end, messages, ids, tuple(stop)))
        least = end
    return found


def _number(state: Mapping[str, Any], name: str, least: int) -> int:
    value = state.get(name)
    if type(value) is not int or not least <= value < 1 << 64:
        raise TransferError(f"{name} must be a whole number from {least} on, got {shown(value)}")
    return value
