"""An error raised at a chosen line of the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import specpool

FOLDER = Path(specpool.__file__).parent
FILES = tuple(
    str(FOLDER / f"engine/{name}.py")
    for name in (
        "core", "engine", "output", "session", "loop/loop", "loop/scrub", "memory/host/pages",
        "memory/host/tier", "scheduler/admission", "scheduler/conversations", "scheduler/pins",
        "scheduler/prefill", "scheduler/queues", "scheduler/reclaim", "scheduler/request",
        "scheduler/rows", "scheduler/scheduler",
    )
)  # fmt: skip


class Interrupter:
    """Raises at the nth line that runs in these files or folders; `count` says how many did."""

    def __init__(
        self,
        at: int | None,
        error: type[BaseException] = KeyboardInterrupt,
        files: tuple[str, ...] = FILES,
    ) -> None:
        missing = [file for file in files if not Path(file).exists()]
        assert not missing, f"a moved file would never be interrupted: {missing}"
        self.at, self.count, self.error, self.files = at, 0, error, files
        self.place = ""

    def __enter__(self) -> Interrupter:
        self._before = sys.gettrace()  # a measure of coverage goes on afterwards
        sys.settrace(self._frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _frame(self, frame: Any, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(self.files) else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                self.place = f"{frame.f_code.co_filename.split('/')[-1]}:{frame.f_lineno}"
                raise self.error(f"at {self.place}")
        return self._line
