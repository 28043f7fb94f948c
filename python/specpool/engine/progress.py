"""A progress bar on standard error, for `Engine.generate`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specpool.checks import shown
from specpool.engine.scheduler.request import Request
from specpool.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

#: Seconds after which a call is long enough for a bar on a terminal.
LONG = 1.0
_SECONDS_BETWEEN = 0.1  # between two refreshes


class ProgressBar:
    """A bar that shows how far some requests are, from the first `update` to `close`.

    A request that ends early counts as if it had generated all its tokens.
    """

    def __init__(self, requests: Sequence[Request], wanted: bool | None) -> None:
        """Prepare a bar for these requests; it appears with the first `update` after its time.

        Args:
            requests: the requests to watch.
            wanted: True shows a bar, False shows none, None shows one on a terminal after `LONG`
                seconds.

        Raises:
            ConfigError: `wanted` is True but rich is not installed, or `wanted` is not a bool.
        """
        if wanted is not None and not isinstance(wanted, bool):
            raise ConfigError(f"progress must be True, False or None, got {shown(wanted)}")
        self._requests = requests
        self._tokens = [0] * len(requests)  # output tokens at the latest `update` of each
        self._done = [False] * len(requests)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._is_shown = wanted is True or (wanted is None and sys.stderr.isatty())
        if self._is_shown:
            try:
                import rich.progress  # noqa: F401
            except ModuleNotFoundError:
                if wanted:
                    raise ConfigError(
                        "a progress bar needs rich: pip install 'specpool[hf]'"
                    ) from None
                self._is_shown = False
        now = time.monotonic()
        self._next = now if wanted else now + LONG

    def update(self, index: int) -> None:
        """Count the progress of the request at `index`, and refresh the bar if it is time."""
        if not self._is_shown:
            return
        request = self._requests[index]
        self._tokens[index] = request.num_output_tokens
        self._done[index] = request.finish_reason is not None
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _SECONDS_BETWEEN
            self._show()

    def close(self) -> None:
        """Refresh the bar a last time and leave it on the screen."""
        if self._progress is not None:
            self._show()
            self._progress.stop()
            self._progress = None

    def _show(self) -> None:
        max_tokens = [request.max_len - request.prompt_len for request in self._requests]
        done = zip(self._tokens, self._done, max_tokens, strict=True)
        completed = sum(limit if is_done else tokens for tokens, is_done, limit in done)
        if self._progress is None:
            self._progress, self._task = _bar(sum(max_tokens))
        assert self._task is not None
        self._progress.update(
            self._task,
            completed=completed,
            requests=f"{sum(self._done)}/{len(self._requests)} requests",
            tokens=f"{sum(self._tokens)} tokens",
        )
        self._progress.refresh()


def _bar(total: int) -> tuple[Progress, TaskID]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.fields[requests]}"),
        BarColumn(),
        TextColumn("{task.fields[tokens]}"),
        TimeElapsedColumn(),
    )
    # No automatic refresh: rich would start a thread beside the engine's.
    progress = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
    task = progress.add_task("", total=total, requests="", tokens="")
    progress.start()
    return progress, task
