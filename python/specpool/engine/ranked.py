"""`RankedEngine`: what an engine does with the other ranks: lead them, or follow rank 0."""

from __future__ import annotations

import contextlib
import threading
import time

from specpool.engine.core import EngineCore
from specpool.engine.follower import Follower, output_wire
from specpool.engine.output import RequestOutput
from specpool.errors import ConfigError, CorruptState, RankError
from specpool.models import TargetModel
from specpool.ranks.group import Ranks

#: Seconds after which an idle rank 0 says that it is there, so that nobody waits in vain.
IDLE_SECONDS = 1.0
#: Seconds that a rank with an error stays, so that rank 0 hears of it and writes its log.
_LINGER = 3.0


class RankedEngine:
    """An engine's end of its group of ranks."""

    def __init__(self, core: EngineCore, ranks: Ranks, target: TargetModel) -> None:
        """Lead on rank 0: from now on its records keep the others informed. Else wait."""
        self._core, self._ranks, self._target = core, ranks, target
        self._over = threading.Event()
        if ranks.leads:
            threading.Thread(target=self._stay, name="idle-records", daemon=True).start()

    def compare(self, first: RequestOutput, second: RequestOutput) -> None:
        """Let the others take part in a comparison. Hold the lock."""
        self._core.inputs.flush("compare", output_wire(first), output_wire(second))

    def follow(self) -> None:
        """Apply records until rank 0 ends; see `Engine.follow`."""
        if self._ranks.leads:
            raise ConfigError("rank 0 leads: the other ranks follow")
        follower = Follower(self._core, self._target)
        try:
            while follower.apply(self._ranks.receive()):
                pass
        except BaseException as error:
            if isinstance(error, CorruptState):
                error = CorruptState(f"rank {self._ranks.rank}: {error}{self._logs()}")
            self._core.inputs.broke(error)  # the others hear of it
            raise error from None

    def end(self) -> None:
        """Tell the others that rank 0 ends. A second call does nothing."""
        if self._over.is_set():
            return
        self._over.set()
        inputs = self._core.inputs
        if self._ranks.leads and inputs.broken is None:
            with contextlib.suppress(RankError):
                inputs.flush("end")

    def leave(self) -> None:
        """Remove the event log, or leave the group and keep the log if the ranks have parted."""
        if self._core.inputs.broken is None:
            self._ranks.forget_log()
            return
        self._ranks.close()
        if not self._ranks.leads:
            time.sleep(_LINGER)

    def _logs(self) -> str:
        own, other = self._ranks.log_of(self._ranks.rank), self._ranks.log_of(0)
        return f"; specpool replay {own} --against {other} names the first call that differs"

    def _stay(self) -> None:
        """Send an empty record when nothing else was sent for a while."""
        inputs, last = self._core.inputs, -1
        while not self._over.wait(IDLE_SECONDS):
            if inputs.num_records == last and inputs.broken is None:
                try:
                    with self._core.lock:
                        is_idle = inputs.num_records == last and not self._over.is_set()
                        if is_idle and inputs.broken is None:
                            inputs.flush()
                except RankError as error:
                    self._ranks.on_lost(str(error))
                    return
            last = inputs.num_records
