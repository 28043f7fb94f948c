"""`Cluster`: Serve on a Ray cluster, by the HTTP interface of its dashboard. Ray is not needed."""

from __future__ import annotations

import contextlib
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specpool.checks import shown, split_url
from specpool.errors import ConfigError

_PATH = "/api/serve/applications/"
#: Seconds for one answer.
_TIMEOUT = 30.0
_POLL = 1.0


class Cluster:
    """A cluster that is running."""

    def __init__(self, address: str) -> None:
        """Talk to this dashboard.

        Raises:
            ConfigError: the address is none.
        """
        parts = split_url("address", address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"address must be a dashboard's, such as http://127.0.0.1:8265, got "
                f"{shown(address)}"
            )
        self._address = address.rstrip("/")

    def apply(self, config: dict[str, Any]) -> None:
        """Give Serve this config; it begins to start or to update the replicas.

        Raises:
            ConfigError: there is no cluster, it refuses, or it serves something else, which this
                config would end.
        """
        (app,) = (app["name"] for app in config["applications"])
        others = sorted(set(self._ask("GET").get("applications", {})) - {app})
        if others:
            raise ConfigError(
                f"the cluster serves {', '.join(others)} too, which this config would end: print "
                "it, put both into one file, and give that to `serve deploy`"
            )
        self._ask("PUT", config)

    def wait(self, app: str, seconds: float, tell: Callable[[str], None]) -> None:
        """Wait until the application runs as its config says; tell each change.

        Raises:
            ConfigError: it failed, or did not run in time.
        """
        end, last = time.monotonic() + seconds, ""
        while True:
            app_status = self._ask("GET").get("applications", {}).get(app, {})
            status, message = app_status.get("status", "NOT_STARTED"), app_status.get("message", "")
            if status != last:
                tell(f"{app}: {status}")
                last = status
            if status == "RUNNING":
                return
            if status == "DEPLOY_FAILED" or status == "UNHEALTHY":
                raise ConfigError(f"{app} is {status}: {_last_line(message)}")
            if time.monotonic() > end:
                raise ConfigError(f"{app} is {status} after {seconds:g} s: {_last_line(message)}")
            time.sleep(_POLL)

    def _ask(self, method: str, body: Any = None) -> dict[str, Any]:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + _PATH,
            content,
            {"content-type": "application/json", "accept": "application/json"} | _token(),
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            why = error.read().decode(errors="replace")
            if error.code == 401:
                why = "its token is missing or wrong: set RAY_AUTH_TOKEN"
            raise ConfigError(
                f"the cluster at {self._address} answers {error.code}: {_last_line(why)}"
            ) from None
        except (OSError, ValueError) as error:
            why = str(getattr(error, "reason", error))
            raise ConfigError(
                f"there is no Ray cluster at {self._address}: {why[:200]}; start one (`ray start "
                "--head`), or give --address"
            ) from None
        try:
            answer = json.loads(text) if text else {}
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ConfigError(f"{self._address} is no Ray dashboard: its answer is no JSON object")
        return answer


def _token() -> dict[str, str]:
    """Return the header with the cluster's token, from where Ray's own tools read it."""
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    if not token:
        default = Path.home() / ".ray" / "auth_token"
        with contextlib.suppress(OSError, UnicodeDecodeError):
            token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or default).read_text("utf-8")
    token = token.strip()
    return {"authorization": f"Bearer {token}"} if token else {}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:400] if lines else "it does not say why"
