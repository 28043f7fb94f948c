"""`RankedEngine`: what an engine does with the other ranks: lead them, or follow rank 0."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from specpool.engine.comparison import Comparison, check_pair, compare
from specpool.engine.core import EngineCore
from specpool.engine.models import TargetModel
from specpool.engine.output import RequestOutput
from specpool.engine.ranks.following import Follower
from specpool.engine.ranks.group import Ranks
from specpool.engine.scheduler.request import Request
from specpool.engine.scheduler.wire import checked
from specpool.errors import ConfigError, CorruptState, RankError

#: Seconds after which an idle rank 0 says that it is there, so that nobody waits in vain.
IDLE_SECONDS = 1.0
#: Seconds that a rank with an error stays, so that rank 0 notices it and writes its log.
_LINGER = 3.0


class RankedEngine:
    """An engine's end of its group of ranks; without a group it does nothing."""

    def __init__(self, core: EngineCore, ranks: Ranks | None, target: TargetModel) -> None:
        """Lead on rank 0: from now on its records keep the others informed. Else wait."""
        self._core, self._ranks, self._target = core, ranks, target
        self._ended = threading.Event()
        if ranks is not None and ranks.leads:
            threading.Thread(target=self._send_when_idle, name="idle-records", daemon=True).start()

    def compare(self, first: RequestOutput, second: RequestOutput) -> Comparison:
        """Compare two outputs, with the other ranks' part in the forwards. Hold the lock."""
        check_pair(first, second)
        if self._core.journal is not None:
            self._core.journal.flush("compare", first, second)
        return compare(self._target, first, second)

    def follow(self) -> None:
        """Apply records until rank 0 ends; see `Engine.follow`."""
        core, ranks, journal = self._core, self._ranks, self._core.journal
        if ranks is None or journal is None or ranks.leads:
            raise ConfigError("this process is alone, or rank 0: only the other ranks follow")
        calls = {"turn": core.loop.turn, "drain": core.loop.drain, "compare": self._judge}
        follower = Follower(journal, core.scheduler, self._equip, calls)
        try:
            is_following = True
            while is_following:
                data = ranks.receive()
                with core.lock:
                    is_following = follower.apply(data)
        except BaseException as error:
            if isinstance(error, CorruptState):
                error = CorruptState(f"rank {ranks.rank}: {error}{_logs(ranks)}")
            journal.report_failure(error)  # the others hear of it
            raise error from None

    def end(self) -> None:
        """Tell the others that rank 0 ends. A second call does nothing."""
        journal = self._core.journal
        if self._ended.is_set() or self._ranks is None or journal is None:
            return
        self._ended.set()
        if self._ranks.leads and journal.broken is None:
            with contextlib.suppress(RankError):
                journal.flush("end")

    def leave(self) -> None:
        """Remove the event log, or leave the group and keep the log if the ranks have parted."""
        journal = self._core.journal
        if self._ranks is None or journal is None:
            return
        if journal.broken is None:
            self._ranks.forget_log()
            return
        self._ranks.close()
        if not self._ranks.leads:
            time.sleep(_LINGER)

    def _equip(self, request: Request) -> None:
        """Give a request what finds its end, as `Prompts` does on rank 0."""
        params = request.params
        if params.stop:
            request.watch = params.text_stream(self._core.tokenizer, request.stop_ids)
        if params.structured is not None:
            request.matcher = self._core.compiler.matcher(params.structured, request.stop_ids)

    def _judge(self, *outputs: Any) -> None:
        """Take part in the forwards of a comparison, whose result rank 0 gives out."""
        compare(self._target, *(checked(output, RequestOutput) for output in outputs))

    def _send_when_idle(self) -> None:
        """Send an empty record when nothing else was sent for `IDLE_SECONDS`."""
        journal, ranks, last = self._core.journal, self._ranks, -1
        assert ranks is not None and journal is not None
        while not self._ended.wait(IDLE_SECONDS):
            if journal.num_records == last and journal.broken is None:
                try:
                    with self._core.lock:
                        is_idle = journal.num_records == last and not self._ended.is_set()
                        if is_idle and journal.broken is None:
                            journal.flush()
                except RankError as error:
                    ranks.on_lost(str(error))
                    return
            last = journal.num_records


def _logs(ranks: Ranks) -> str:
    own_log, first_log = ranks.log_of(ranks.rank), ranks.log_of(0)
    return f"; specpool replay {own_log} --against {first_log} names the first call that differs"
