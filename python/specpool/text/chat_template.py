"""`render`: renders a checkpoint's chat template in a second process, within limits.

A template is a Jinja program. transformers' sandbox keeps it from files and from Python, but lets
it loop and allocate without end. So a second process renders with transformers' own function. It
may take at most `MOST_BYTES` more than it began with (on Linux), and is killed after
`MOST_SECONDS`. It starts with the first chat, serves all engines of this process, and ends with it.

Run as a file, this module is that second process. It reads one JSON line per request from standard
input, and answers each with one JSON line on standard output.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

#: The most seconds of a template, which normally takes milliseconds; a longer one is stopped.
MOST_SECONDS = 20.0
#: The most seconds for the start of the process, which imports transformers.
START_SECONDS = 120.0
#: The most memory of a template, in bytes.
MOST_BYTES = 1 << 29
#: The most characters of a rendered chat.
MOST_CHARACTERS = 1 << 25
#: Names that `variables` cannot have: `render`, transformers and Jinja use them for their own.
RESERVED = frozenset(
    "add_generation_prompt chat_template continue_final_message conversation conversations "
    "max_length messages padding return_assistant_tokens_mask return_dict return_tensors "
    "sanitize_control_tokens self tokenize tokenizer_kwargs tools truncation".split()
)


class TemplateError(Exception):
    """A template refused its messages, or passed a limit."""


class _Process:
    """The rendering process. It starts when it is needed, and again after it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0  # the process that started it; a forked child starts its own

    def ask(self, request: Mapping[str, Any]) -> dict[str, str]:
        """Return the answer to one request.

        Raises:
            TemplateError: there was no answer in time, or the process cannot run.
        """
        line = json.dumps(request)
        with self._lock:
            self._start()
            answer: dict[str, str] = self._say(line, MOST_SECONDS)
            return answer

    def _say(self, line: str, seconds: float) -> Any:
        """Send a line and return the answer; end the process if none comes in time."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())
        except (OSError, ValueError) as error:  # the process is gone, perhaps within a line
            self._end()
            told = "the process that renders it ended"
            if late.is_set():
                told = f"it has not ended after {seconds:g} s, and was stopped"
            raise TemplateError(told) from error
        except BaseException:  # Ctrl-C: the next request must not get this answer
            self._end()
            raise
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _start(self) -> None:
        if self._owner != os.getpid():
            self._process, self._owner = None, os.getpid()
        if self._process is None:
            more = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OPENBLAS_NUM_THREADS": "1"}
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    encoding="utf-8",
                    env={**os.environ, **more},
                    start_new_session=True,  # so that Ctrl-C does not reach it
                )
            except OSError as error:
                raise TemplateError(f"no process to render it: {error}") from error
            self._say(json.dumps([path for path in sys.path if path]), START_SECONDS)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()


_process = _Process()
atexit.register(_process.close)


def render(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str:
    """Render a chat up to where the answer begins.

    Args:
        template: Jinja, as transformers takes it.
        messages: plain data, as in JSON.
        variables: further variables of the template, such as the special tokens.

    Returns:
        The text.

    Raises:
        TemplateError: the template refuses or passes a limit, or the messages are not plain data.
    """
    request = {
        "template": template,
        "messages": [{k: v for k, v in one.items() if v is not None} for one in messages],
        "variables": dict(variables),
        "most": [MOST_BYTES, MOST_CHARACTERS],
    }
    try:
        answer = _process.ask(request)
    except (TypeError, RecursionError) as error:
        raise TemplateError(f"messages must be of plain data: {error}") from error
    if "error" in answer:
        raise TemplateError(answer["error"])
    return answer["text"]


def _serve() -> None:
    """Answer requests until standard input ends."""
    sys.path[:] = json.loads(sys.stdin.readline())
    from transformers.utils.chat_template_utils import render_jinja_template

    print("true", flush=True)
    is_limited = False
    for line in sys.stdin:
        request = json.loads(line)
        num_bytes, num_characters = request["most"]
        try:
            if not is_limited:
                _limit_memory(num_bytes)
                is_limited = True
            rendered: Any = render_jinja_template(
                conversations=[request["messages"]],
                chat_template=request["template"],
                add_generation_prompt=True,
                **request["variables"],
            )
            text = rendered[0][0]
            if len(text) > num_characters:
                raise ValueError(f"{len(text)} characters, at most {num_characters} are allowed")
            answer = json.dumps({"text": text})
        except BaseException as error:
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]})
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


def _limit_memory(num_bytes: int) -> None:
    """Limit this process to `num_bytes` more than it has now, if the system supports it."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, resource.RLIM_INFINITY))
    except (ImportError, OSError, ValueError):
        return


if __name__ == "__main__":
    _serve()
