"""`Runner`: the engine's end. It hears the front's messages between two turns, and answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from specpool.engine.engine import Engine
from specpool.engine.moving.identity import config_key
from specpool.engine.output import Chunk, RequestOutput
from specpool.engine.session import Session
from specpool.errors import ConfigError, TransferError, is_fault
from specpool.serve.bridge.forms import Forms
from specpool.serve.bridge.messages import (
    Abort,
    Accepted,
    Done,
    Ready,
    Refused,
    Reply,
    Stop,
    Submit,
    Tokens,
    VerbCall,
)

log = logging.getLogger("specpool.serve")

#: Seconds between two looks at forms that are being compiled, if nothing else runs.
_COMPILE_POLL = 0.002
#: The most bytes of a session that is copied with its KV; the text of a larger one goes alone.
MOST_IMAGE = 256 << 20
#: The most lists of messages that are taken between two turns.
_MOST_HEARD = 64


class Line(Protocol):
    """The way to the front: lists of messages, in order."""

    def poll(self, timeout: float | None) -> bool:
        """Return whether a list can be received; wait up to `timeout` seconds, or for ever."""

    def recv(self) -> list[Any]:
        """Return the next list. EOFError: the front is gone."""

    def send(self, messages: list[Any]) -> None:
        """Send a list."""


class Runner:
    """A loop around an engine: messages in, turns, messages out."""

    def __init__(self, engine: Engine, line: Line) -> None:
        """Serve this engine on this line."""
        self._engine, self._line = engine, line
        self._out: list[Any] = []  # what the turn has to say
        self._keys: dict[int, int] = {}  # the engine's number -> the front's key
        self._numbers: dict[int, set[int]] = {}  # the front's key -> the engine's numbers
        self._sessions: dict[int, Session] = {}
        self._stopped = False
        self._forms = Forms(engine.core.compiler, engine.core.compile)
        self.verbs: dict[str, Callable[..., Any]] = {
            "stats": engine.stats,
            "pool": self._pool,
            "open": self._open,
            "export": self._export,
            "fork": self._fork,
            "rewind": lambda number, offset: self._session(number).rewind(offset),
            "close": self._close,
        }

    def run(self) -> None:
        """Serve until the front says `Stop` or is gone."""
        self._engine.core.prompts.log_defaults(draws=True)
        self._line.send([ready_of(self._engine)])
        busy = False
        while True:
            try:
                self._hear(0 if busy else _COMPILE_POLL if self._forms else None)
            except EOFError:  # the front has died
                break
            if self._stopped:
                break
            self._take_compiled()
            busy = self._engine.turn()
            if self._out:
                out, self._out = self._out, []
                self._line.send(out)
        self._forms.close()

    def _hear(self, timeout: float | None) -> None:
        """Take messages that are there; wait for the first up to `timeout` seconds, or for ever."""
        for _ in range(_MOST_HEARD):  # so that a flood does not keep the rounds waiting
            if not self._line.poll(timeout):
                return
            timeout = 0
            for message in self._line.recv():
                self._take(message)
            if self._out:
                out, self._out = self._out, []
                self._line.send(out)
            if self._stopped:
                return

    def _take(self, message: Any) -> None:
        if isinstance(message, Submit) and message.params.structured is not None:
            self._forms.add(message)
        elif isinstance(message, Submit):
            self._answer(message.key, self._submit, message)
        elif isinstance(message, VerbCall):
            self._answer(message.key, self._call, message)
        elif isinstance(message, Abort):
            if self._forms.drop(message.key):
                self._out.append(Refused(message.key, "it was aborted", is_users=True))
            for number in sorted(self._numbers.get(message.key, ())):
                self._engine.abort(number)
        elif isinstance(message, Stop):
            self._stopped = True

    def _take_compiled(self) -> None:
        """Submit what waited for its form."""
        for compiling, message in self._forms.take():

            def submit(message: Submit, compiling: Future[None] = compiling) -> Accepted:
                compiling.result()  # raises what is wrong with the form
                return self._submit(message)

            self._answer(message.key, submit, message)

    def _answer(self, key: int, act: Callable[[Any], Any], message: Any) -> None:
        """Do what a message asks for, and queue the answer; an error is an answer too."""
        try:
            self._out.append(act(message))
        except ConfigError as error:
            self._out.append(Refused(key, str(error), is_users=True))
        except BaseException as error:
            if not is_fault(error):
                raise
            log.exception("the engine refused a call")
            self._out.append(Refused(key, f"{type(error).__name__}: {error}", is_users=False))

    def _submit(self, message: Submit) -> Accepted:
        session = None if message.session is None else self._session(message.session)
        first = self._engine.submit(
            message.prompt,
            message.params,
            priority=message.priority,
            session=session,
            decode=False,
            on_item=self._tell,
        )
        numbers = range(first, first + message.params.n)
        self._numbers[message.key] = set(numbers)
        self._keys |= dict.fromkeys(numbers, message.key)
        return Accepted(message.key)

    def _call(self, message: VerbCall) -> Reply:
        return Reply(message.key, self.verbs[message.verb](*message.args))

    def _tell(self, number: int, item: Chunk | RequestOutput) -> None:
        """Queue new tokens or the end of a request for the front."""
        key = self._keys[number]
        if isinstance(item, Chunk):
            tokens = Tokens(key, item.sample, item.token_ids, item.from_draft, item.logprobs)
            self._out.append(tokens)
            return
        self._out.append(done_of(key, item))
        del self._keys[number]
        self._numbers[key].discard(number)
        if not self._numbers[key]:
            del self._numbers[key]

    # --- sessions and pools -------------------------------------------------------------------

    def _session(self, number: int) -> Session:
        if number not in self._sessions:
            raise ConfigError(f"there is no session {number}")
        return self._sessions[number]

    def _open(
        self, max_tokens: int | None, tokens: Sequence[int] = (), image: bytes | None = None
    ) -> int:
        """Open a session with these tokens, and with the KV of an image if it can be used here."""
        session = None if image is None else self._import(image)
        if session is None:
            session = self._engine.open_session(max_tokens=max_tokens, tokens=tokens)
        self._sessions[session.number] = session
        return session.number

    def _export(self, number: int) -> bytes | None:
        """Return a copy of an idle session with its KV; None if its text has to go alone."""
        session, engine = self._session(number), self._engine
        if session.is_busy:
            raise ConfigError(f"session {number} has a turn that has not ended")
        if engine.core.journal is not None:  # each rank has a part of the KV
            return None
        with engine.export(session) as export:
            if not export.length or export.num_bytes > MOST_IMAGE:
                return None
            return export.image().tobytes()

    def _import(self, image: bytes) -> Session | None:
        """Take a session in; None if its KV cannot be used here, such as KV of another layout."""
        engine = self._engine
        if engine.core.journal is not None:
            return None
        try:
            session = engine.import_row(np.frombuffer(image, np.uint8))
        except TransferError as error:
            log.info("a session comes without its KV: %s", error)
            return None
        assert isinstance(session, Session)
        return session

    def _fork(self, number: int) -> int:
        copy = self._session(number).fork()
        self._sessions[copy.number] = copy
        return copy.number

    def _close(self, number: int) -> None:
        self._session(number).close()
        del self._sessions[number]

    def _pool(self) -> list[dict[str, Any]]:
        """Return each group's pages as runs `[pages, state, owner]`, from page 1 on."""
        groups = []
        for index, group in enumerate(self._engine.ledger.groups):
            states, owners, _ = self._engine.ledger.ownership_map(index, taken=True)
            groups.append(
                {
                    "name": group.name,
                    "page_size": group.page_size,
                    "num_pages": group.num_pages,
                    "runs": _runs(states[1:], owners[1:]),
                }
            )
        return groups


def _runs(states: np.ndarray[Any, Any], owners: np.ndarray[Any, Any]) -> list[list[int]]:
    """Join neighbours of one state and owner; pages that were never taken are left out."""
    if not len(states):
        return []
    owners = np.where((states == 1) | (states == 2), owners, 0)
    starts = np.flatnonzero(np.diff(states) | (np.diff(owners) != 0)) + 1
    starts = np.concatenate(([0], starts))
    counts = np.diff(np.append(starts, len(states)))
    runs: list[list[int]] = np.stack([counts, states[starts], owners[starts]], axis=1).tolist()
    return runs


def ready_of(engine: Engine) -> Ready:
    """Return what the front has to know of an engine."""
    shape, config = engine.shape, engine.config
    return Ready(
        max_context_len=engine.max_context_len,
        vocab_size=engine.target.vocab_size,
        eos_token_ids=frozenset(engine.target.eos_token_ids),
        max_batch=engine.ledger.max_batch,
        groups=tuple((g.name, g.page_size, g.num_pages) for g in engine.ledger.groups),
        config={
            "model_type": str(engine.target.config.model_type),
            "speculative_num_steps": shape.num_steps,
            "speculative_eagle_topk": shape.topk,
            "speculative_num_draft_tokens": shape.num_draft_tokens,
            "max_running_requests": engine.ledger.max_batch,
            "context_length": engine.max_context_len,
            "page_size": config.page_size,
            "overlap_depth": engine.ledger.overlap_depth,
            "kv_bytes": engine.kv_bytes,
            "state_bytes": engine.state_bytes,
            "drafters": [*engine.drafters],
        },
        tokenizer=None if engine.tokenizer is None else str(engine.tokenizer.name_or_path),
        temperature=engine.target.generation_defaults.server_temperature,
        model_key=config_key(engine.target),
    )


def done_of(key: int, output: RequestOutput) -> Done:
    """Return what the front has to know of a sample that has ended."""
    return Done(
        key=key,
        sample=output.sample,
        finish_reason=output.finish_reason,
        error=output.error,
        stop_hit=output.stop_hit,
        num_prompt=len(output.prompt_ids),
        token_ids=output.token_ids,
        num_reused=output.num_reused,
        num_drafts=output.num_drafts,
        num_accepted=sum(output.from_draft),
        accept_lens=output.accept_lens,
        queue_seconds=output.queue_seconds,
        first_token_seconds=output.first_token_seconds,
        seconds=output.seconds,
    )
