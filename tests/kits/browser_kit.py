"""A headless Chromium, driven through its debugging pipe: no port, no further package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NO_CHROMIUM = "no Chromium here: apt-get install chromium"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Browser:
    """One page of a headless Chromium."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        into, self._into = os.pipe()
        self._out, out = os.pipe()

        def place() -> None:  # Chromium reads commands from 3 and writes answers to 4
            high = [os.dup(into), os.dup(out)]
            high = [os.dup2(fd, 100 + i) for i, fd in enumerate(high)]
            for fd, number in zip(high, (3, 4), strict=True):
                os.dup2(fd, number)

        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += ["--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            command,
            preexec_fn=place,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(into)
        os.close(out)
        self._held, self._number, self._session = b"", 0, None
        self.errors: list[str] = []  # what the page's console has of errors
        target_id = self._wait_for_page()
        self._session = self.call("Target.attachToTarget", targetId=target_id, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def _wait_for_page(self) -> str:
        for _ in range(200):
            pages = self.call("Target.getTargets")["targetInfos"]
            target_ids = [page["targetId"] for page in pages if page["type"] == "page"]
            if target_ids:
                return target_ids[0]
            time.sleep(0.05)
        raise AssertionError("Chromium has no page")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the debugging protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._into, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._out], [], [], 60)
            part = os.read(self._out, 1 << 16) if ready else b""
            assert part, "Chromium does not answer"
            self._held += part
        line, _, self._held = self._held.partition(b"\0")
        return json.loads(line)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        if message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    def run(self, script: str) -> Any:
        """Evaluate an expression in the page; a promise is awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, condition: str, seconds: float = 30) -> Any:
        """Wait until an expression of the page is true; returns its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(condition)):
            assert time.monotonic() < end, (condition, self.run("document.body.innerText"))
            time.sleep(0.05)
        return value

    def go(self, url: str) -> None:
        """Open a page."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def look(self, width: int, height: int = 800, dark: bool = False) -> None:
        """Set the window's size and colour scheme."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def picture(self) -> bytes:
        """A PNG of the window."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def type(self, text: str) -> None:
        """Type a text into what has the focus, as a keyboard would."""
        self.call("Input.insertText", text=text)

    def press_enter(self) -> None:
        """Press the Enter key."""
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        self.call("Input.dispatchKeyEvent", type="keyDown", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(20)
        os.close(self._into)
        os.close(self._out)
