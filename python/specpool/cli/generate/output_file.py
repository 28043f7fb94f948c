"""`OutputFile`: writes each output as a line of JSON once it is complete."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from specpool.engine.output import RequestOutput
from specpool.errors import ConfigError

if TYPE_CHECKING:
    from specpool.engine.texts import Prompt


class OutputFile:
    """The file of `--out`; a context manager.

    A line is an object: `prompt` as it was given, and the fields of `RequestOutput`. Lines come in
    the order in which the outputs end; `index` and `sample` name their prompts. Written lines stay
    if the run is interrupted.
    """

    def __init__(self, path: Path | None, prompts: Sequence[Prompt], *, force: bool) -> None:
        """Open the file; if `path` is None, write nothing.

        Raises:
            ConfigError: the file cannot be written, or exists and `force` is not set.
        """
        self._path, self._prompts = path, prompts
        self._file: IO[str] | None = None
        if path is not None:
            try:
                self._file = path.open("w" if force else "x", encoding="utf-8")
            except OSError as error:
                raise self._error(error) from None

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what a full disk did not take is still buffered
                self._file.close()

    def write(self, output: RequestOutput) -> None:
        """Write an output.

        Raises:
            ConfigError: the disk is full.
        """
        if self._file is None:
            return
        line: dict[str, Any] = {"prompt": self._prompts[output.index], **asdict(output)}
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._error(error) from None

    def _error(self, error: OSError) -> ConfigError:
        return ConfigError(f"cannot write {self._path}: {error.strerror or error}")
