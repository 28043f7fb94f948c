"""`Service`: what the paths of the server share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from specpool.engine.texts import Texts
from specpool.serve.api.errors import ApiError, shutting_down, too_long
from specpool.serve.bridge.client import EngineClient
from specpool.serve.config import ServeConfig
from specpool.serve.counters import Counters
from specpool.serve.keys import Keys
from specpool.serve.sessions import Sessions
from specpool.serve.turns import Turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

#: Paths whose work waits for the engine.
WORK_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
#: Requests for work that go on in one round of the event loop.
_PER_ROUND = 2
#: A chat template for models without one: the texts as they are, a line each.
PLAIN_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


class Service:
    """The server's state, beside its engine.

    Attributes:
        config: the options.
        client: the way to the engine.
        tokenizer: the target's.
        keys: the API keys.
        sessions: the open sessions.
        counters: what the front measures.
        turns: requests for work are checked, and later parsed, tokenized and submitted, a few in
            each round of the event loop, so that a crowd of them keeps it from nothing else.
        num_arriving: requests for work that have come and are not submitted yet.
        created: seconds since 1970 when the server began.
        is_draining: the server stops, and takes no new work.
    """

    def __init__(
        self,
        config: ServeConfig,
        client: EngineClient,
        tokenizer: PreTrainedTokenizerBase,
        tag: str | None = None,
    ) -> None:
        """Serve an engine that is ready; see `Sessions` for the tag."""
        self.config, self.client, self.tokenizer = config, client, tokenizer
        self.keys = Keys(config)
        self.sessions = Sessions(client, config, tag)
        self.counters = Counters(config.names[0])
        self.turns = Turns(_PER_ROUND)
        self.num_arriving = 0
        self.created = int(time.time())
        self.is_draining = False
        # Tokenizers release the interpreter's lock, so the event loop goes on meanwhile.
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        # One thread: a parser keeps the lock, and the event loop gets it between two bodies.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._converter = ThreadPoolExecutor(1, thread_name_prefix="convert")

    async def aside(self, act: Callable[..., T], *args: object) -> T:
        """Run work of more than a moment, such as tokenizing, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, act, *args)

    async def read_aside(self, act: Callable[..., T], *args: object) -> T:
        """Parse a large body in a thread, one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, act, *args)

    async def write_aside(self, act: Callable[..., T], *args: object) -> T:
        """Write a large answer in a thread, one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, act, *args)

    async def convert_aside(self, act: Callable[..., T], *args: object) -> T:
        """Do the work of `/tokenize` and `/detokenize` in a thread, one call at a time.

        `max_queue` does not count these calls: no text shall wait for them.
        """
        return await asyncio.get_running_loop().run_in_executor(self._converter, act, *args)

    @cached_property
    def texts(self) -> Texts:
        """Tokenizes prompts."""
        return Texts(self.tokenizer, self.client.ready.max_context_len)

    @cached_property
    def most_characters(self) -> int:
        """The characters of the longest text that can fit, whatever its tokens are."""
        longest = max(map(len, self.tokenizer.get_vocab()), default=1)
        return self.client.ready.max_context_len * longest

    def check_characters(self, number: int, param: str) -> None:
        """Refuse a text that cannot fit, before it is tokenized.

        Args:
            number: its characters.
            param: the field that has it.

        Raises:
            ApiError: even in the longest tokens it is too long.
        """
        if number > self.most_characters:
            raise too_long(
                f"the prompt has {number} characters; at most {self.most_characters} can be "
                f"{self.client.ready.max_context_len} tokens",
                param,
            )

    @property
    def num_open(self) -> int:
        """The samples that run and wait, and the requests that are not submitted yet."""
        return self.client.num_open + self.num_arriving

    @property
    def most_open(self) -> int:
        """The most samples that may run and wait."""
        return self.client.ready.max_batch + self.config.max_queue

    def check_model(self, name: str | None) -> str:
        """Return the model's name for the answer.

        Raises:
            ApiError: the client asks for another model.
        """
        if name is None:
            return self.config.names[0]
        if name not in self.config.names:
            raise ApiError(
                404,
                f"the model {name!r:.100} does not exist; this server has "
                f"{', '.join(self.config.names)}",
                code="model_not_found",
                param="model",
            )
        return name

    def check_room(self, num_new: int = 0) -> None:
        """Refuse work that the server cannot take.

        Args:
            num_new: the texts that it asks for; 0 if it has only arrived.

        Raises:
            ApiError: the server stops (503), or too many samples wait (429).
        """
        if self.is_draining:
            raise shutting_down()
        num_open = self.client.num_open
        if not num_new:
            num_open, num_new = self.num_open, 1
        if num_open + num_new > self.most_open:
            raise ApiError(
                429,
                f"{num_open} texts run or wait, at most {self.most_open} may: try again later",
                code="queue_full",
                headers={"retry-after": "1"},
            )

    def close(self) -> None:
        """End the threads."""
        for pool in (self._pool, self._reader, self._writer, self._converter):
            pool.shutdown(wait=False, cancel_futures=True)
