"""`Clients`: some users of one engine, each of whom sends a request when the one before has ended.

So the batch stays full until the last requests. If all requests began together, those whose drafts
are right would end early, and the rest would run in a small batch, which no service does. Requests
have different lengths: else plain rows would begin and end together, and share their prefills.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specpool.engine.engine import Engine
from specpool.engine.output import Chunk, RequestOutput
from specpool.engine.sampling_params import SamplingParams


def lengths(num: int, mean: int) -> list[int]:
    """Return the tokens of some requests, spread evenly over half of the mean to one and a half."""
    return [max(round(mean * (0.5 + (0.618034 * number) % 1)), 1) for number in range(num)]


class Clients:
    """The same requests, again and again.

    Attributes:
        texts: the texts of the pass so far, by the number of the prompt.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        num_clients: int,
    ) -> None:
        """Client i sends the prompts i, i + num_clients, ... in turn."""
        self.engine, self._prompts, self._params = engine, prompts, params
        self._num_clients = num_clients
        self.texts: list[list[int]] = []

    def begin(self) -> None:
        """Send the first requests of a pass."""
        self.texts = [[] for _ in self._prompts]
        for client in range(self._num_clients):
            self._next(iter(range(client, len(self._prompts), self._num_clients)))

    def turns(self, max_turns: int) -> bool:
        """Run at most `max_turns` turns of the engine; return whether there are more."""
        return all(self.engine.turn() for _ in range(max_turns))

    def _next(self, numbers: Iterator[int]) -> None:
        if (number := next(numbers, None)) is None:
            return

        def note(_: int, item: Chunk | RequestOutput) -> None:
            if isinstance(item, RequestOutput):
                self.texts[number] = item.token_ids
                self._next(numbers)

        prompt, params = self._prompts[number], self._params[number]
        self.engine.submit(prompt, params, on_item=note, decode=False)
