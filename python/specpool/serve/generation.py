"""`Generation`: the texts of one call, from its prompts to their ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from specpool.engine.sampling_params import SamplingParams
from specpool.engine.texts import NextTurn
from specpool.errors import ConfigError
from specpool.serve.api.choice import AnswerChoice, Delta
from specpool.serve.api.errors import ApiError, bad, engine_gone, internal
from specpool.serve.api.sampling import refused
from specpool.serve.bridge.client import EngineFault, EngineGone, Stream
from specpool.serve.bridge.messages import Done, Tokens
from specpool.serve.service import Service
from specpool.serve.sessions import SessionRecord

log = logging.getLogger("specpool.serve")


@dataclass(frozen=True, slots=True)
class Order:
    """What a call asks of the engine."""

    prompts: Sequence[list[int] | NextTurn]
    params: SamplingParams
    priority: int = 0
    session: SessionRecord | None = None  # taken; its turn is the only prompt
    notes_special: bool = False  # special tokens are told beside the texts

    @property
    def num_prompt(self) -> int:
        """The tokens of all prompts."""
        return sum(len(tokens_of(prompt)) for prompt in self.prompts)


class Generation:
    """The texts of one call. Close it: this aborts what is left, and settles its session.

    Attributes:
        order: what was asked for.
        choices: the texts, by prompt and then by sample.
    """

    def __init__(self, service: Service, order: Order, arrived: float) -> None:
        """Prepare the texts; nothing is submitted yet. `arrived` is by `time.perf_counter`."""
        self._service, self.order, self._arrived = service, order, arrived
        num = len(order.prompts) * order.params.n
        self._check_number(num)
        eos = service.client.ready.eos_token_ids
        self.choices = [
            AnswerChoice(i, service.tokenizer, order.params, eos, notes_special=order.notes_special)
            for i in range(num)
        ]
        self._streams: list[Stream] = []
        self._latest: list[float | None] = [None] * num  # when each text's latest part came
        self._firsts: list[float | None] = [None] * num
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def submit(self) -> None:
        """Send all prompts to the engine: it hears them between two turns.

        Raises:
            ApiError: the server has no room, or no engine; nothing was sent then.
        """
        service, order = self._service, self.order
        service.check_room(len(self.choices))
        seconds = service.config.request_timeout
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)
        session = None if order.session is None else order.session.conversation.number
        try:
            for prompt in order.prompts:
                stream = service.client.submit(
                    prompt, order.params, session=session, priority=order.priority
                )
                self._streams.append(stream)
        except EngineGone as error:
            raise _note_engine_gone(error) from None

    def _check_number(self, num: int) -> None:
        """Refuse more texts than can ever be taken.

        Raises:
            ApiError: waiting would not help.
        """
        config, ready = self._service.config, self._service.client.ready
        max_texts, why = config.max_choices, "the most of a call"
        if self._service.most_open < max_texts:
            max_texts = self._service.most_open
            why = f"of which {ready.max_batch} run and {config.max_queue} wait"
        if num > max_texts:
            raise bad(
                f"the call asks for {num} texts: {self.order.params.n} for each of "
                f"{len(self.order.prompts)} prompts; at most {max_texts}, {why}",
                "n" if self.order.params.n > 1 else "prompt",
            )

    async def accepted(self) -> None:
        """Wait until the engine has queued all prompts, which may take seconds to compile a form.

        Raises:
            ApiError: it refuses one, the time is over, or the server stops.
        """
        num_accepted = 0
        try:
            for stream in self._streams:
                await stream.accepted()
                num_accepted += 1
        except ConfigError as error:  # the engine gets the prompts one by one
            message = str(error).replace("prompt 0 ", f"prompt {num_accepted} ", 1)
            raise refused(ConfigError(message)) from None
        except EngineFault as error:
            log.error("a request was refused: %s", error)
            raise internal() from None
        except EngineGone as error:
            raise _note_engine_gone(error) from None

    async def deltas(self) -> AsyncIterator[tuple[AnswerChoice, Delta]]:
        """Yield the texts' new parts, until all have ended.

        Raises:
            ApiError: a text failed, the time is over, or the server stops.
        """
        per_prompt = self.order.params.n
        try:
            async for prompt, news in _together(self._streams):
                by_sample: dict[int, list[Tokens | Done]] = {}
                for item in news:
                    by_sample.setdefault(item.sample, []).append(item)
                for sample, sample_news in by_sample.items():
                    choice = self.choices[prompt * per_prompt + sample]
                    delta = choice.take(sample_news)
                    self._note(choice, delta)
                    yield choice, delta
        except EngineGone as error:
            raise _note_engine_gone(error) from None

    def close(self) -> None:
        """Abort what is left. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        record, sessions = self.order.session, self._service.sessions
        if record is None:
            for stream in self._streams:
                stream.close()
            return
        if not self._streams:  # the turn was not sent
            sessions.release(record)
            return
        (stream,), (turn,) = self._streams, self.order.prompts
        eos, choice = self._service.client.ready.eos_token_ids, self.choices[0]
        assert isinstance(turn, NextTurn)
        if choice.done is None:
            sessions.settle(record, turn, stream, self.order.params, eos)
        else:
            sessions.end(record, turn, choice.done, self.order.params, eos, choice.message)

    def _note(self, choice: AnswerChoice, delta: Delta) -> None:
        """Measure a part, and raise if the text has failed."""
        counters, now, i = self._service.counters, time.perf_counter(), choice.index
        if delta.num_tokens:
            counters.new(delta.num_tokens)
            latest = self._latest[i]
            if latest is None:
                self._firsts[i] = now - self._arrived
                prompt = self.order.prompts[i // self.order.params.n]
                counters.first(now - self._arrived, len(tokens_of(prompt)))
            else:
                counters.part(now - latest, delta.num_tokens)
            self._latest[i] = now
        if choice.done is None:
            return
        counters.end(choice.done, now - self._arrived, self._firsts[i])
        if choice.done.finish_reason == "error":
            if (choice.done.error or "").startswith("structured: "):  # no token fits its own form
                raise bad(str(choice.done.error), "response_format", "structured_failed")
            log.error("a request failed: %s", choice.done.error)
            raise internal()
        if choice.done.finish_reason == "abort":
            raise ApiError(503, "the request was aborted", code="aborted", retry=False)

    def _expire(self) -> None:
        seconds = self._service.config.request_timeout
        error = ApiError(
            504,
            f"the request took longer than {seconds:g} s and was aborted",
            code="request_timeout",
            retry=False,
        )
        for stream in self._streams:
            stream.fail(error)


def tokens_of(prompt: list[int] | NextTurn) -> list[int]:
    """Return the tokens of a prompt; in a session, with those of the earlier turns."""
    return prompt.tokens if isinstance(prompt, NextTurn) else prompt


def _note_engine_gone(error: EngineGone) -> ApiError:
    log.error("%s", error)
    return engine_gone()


async def _together(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, list[Tokens | Done]]]:
    """Yield the news of several streams as they come, each with its stream's index."""
    if len(streams) == 1:
        while news := await streams[0].news():
            yield 0, news
        return
    tasks = {asyncio.ensure_future(stream.news()): i for i, stream in enumerate(streams)}
    try:
        while tasks:
            ready, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ready:
                index = tasks.pop(task)
                if news := task.result():
                    yield index, news
                    tasks[asyncio.ensure_future(streams[index].news())] = index
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
