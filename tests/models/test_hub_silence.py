"""Laws of a hub that does not answer: it is asked once, for the time that was set, and why is said.

The stand-ins count what they are asked for; nothing here is timed.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
huggingface_hub = pytest.importorskip("huggingface_hub")

from huggingface_hub import constants  # noqa: E402
from huggingface_hub.utils import build_hf_headers  # noqa: E402

from specpool import ConfigError, Engine  # noqa: E402
from specpool.engine.assets import resolve  # noqa: E402
from specpool.engine.models import TargetModel  # noqa: E402
from specpool.engine.models.files.checkpoint import find_folder  # noqa: E402
from specpool.engine.models.files.names import fetch_config  # noqa: E402
from specpool.engine.models.outline import target_outline  # noqa: E402
from specpool.engine.models.target_folder import find_target  # noqa: E402

NAME, COMMIT = "no/such", "a" * 40
SECONDS = 0.25  # what HF_HUB_ETAG_TIMEOUT says in these tests
connect = socket.create_connection

#: All ways by which a name reaches the hub.
WAYS: dict[str, Callable[[], Any]] = {
    "config": lambda: fetch_config(NAME),
    "target": lambda: find_target(NAME),
    "head": lambda: find_folder(NAME),
    "outline": lambda: target_outline(NAME),
    "engine": lambda: Engine.from_pretrained(NAME, max_context_len=64, num_pages=16),
    "draft": lambda: Engine.from_pretrained(draft=NAME, max_context_len=64, num_pages=16),
}


class Network:
    """What stands in for the network; it counts the connections that are asked for."""

    def __init__(self) -> None:
        self.asked = 0
        self.address: tuple[str, int] | None = None  # None = connections are refused

    def create_connection(
        self, address: tuple[str, int], timeout: float, *_: Any, **__: Any
    ) -> Any:
        self.asked += 1
        assert timeout == SECONDS, f"a connection may take {timeout} s"
        if self.address is None:
            raise ConnectionRefusedError(111, "Connection refused")
        return connect(self.address, timeout)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Network:
    """A network whose connections are counted, an empty cache, and no time to wait."""

    def no_sleep(seconds: float) -> None:
        raise AssertionError(f"a wait of {seconds} s before another request")

    network = Network()
    for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        for name in (variable, variable.lower()):
            monkeypatch.delenv(name, raising=False)
    huggingface_hub.close_session()  # a client made before may know a proxy
    build_hf_headers()  # the client looks up its own news once a process, and not while offline
    monkeypatch.setattr(socket, "create_connection", network.create_connection)
    monkeypatch.setattr(time, "sleep", no_sleep)
    template = "http://hub/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", SECONDS)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return network


@pytest.fixture
def silent(network: Network) -> Iterator[Network]:
    """A listening socket that never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        network.address = server.getsockname()
        yield network


class Hub(HTTPServer):
    """A hub that answers every request with one status."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.status, self.headers, self.asked = status, headers, [""] * 0


class _Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.server.asked.append(self.path)
        self.send_response(self.server.status)
        for name, value in self.server.headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    do_GET = do_HEAD  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(network: Network) -> Iterator[Callable[..., Hub]]:
    servers = []

    def start(status: int, **headers: str) -> Hub:
        server = Hub(status, **headers)
        network.address = ("127.0.0.1", server.server_port)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def cache(tmp_path: Path) -> Path:
    """Put the shipped target's config into the cache under `NAME`."""
    folder = tmp_path / "cache" / "models--no--such"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    held = folder / "snapshots" / COMMIT / "config.json"
    held.parent.mkdir(parents=True)
    held.write_bytes((Path(resolve("specpool/tiny")) / "config.json").read_bytes())
    return held


@pytest.mark.parametrize("way", WAYS)
def test_without_a_network_a_name_is_asked_for_once(network: Network, way: str) -> None:
    reason = "http://hub did not answer one request of at most 0.25 s .*Connection refused"
    with pytest.raises(ConfigError, match=f"'{NAME}': there is no such folder, and.*{reason}"):
        WAYS[way]()
    assert network.asked == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_network_without_an_answer_is_waited_for_as_long_as_is_set(
    silent: Network, way: str
) -> None:
    reason = r"http://hub did not answer one request of at most 0.25 s .*imed? ?out"
    with pytest.raises(ConfigError, match=f"'{NAME}': there is no such folder, and.*{reason}"):
        WAYS[way]()
    assert silent.asked == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_name_that_the_hub_does_not_know_is_asked_for_once(
    hub: Callable[..., Hub], way: str
) -> None:
    server = hub(404, X_Error_Code="RepoNotFound")
    with pytest.raises(ConfigError, match=f"'{NAME}': there is no such folder.*Repository Not Fo"):
        WAYS[way]()
    assert server.asked == [f"/{NAME}/resolve/main/config.json"]


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_busy_hub_is_left_to_the_patience_of_its_client(
    hub: Callable[..., Hub], status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server, patient = hub(status), []

    def download(name: str, file: str, *, local_files_only: bool) -> str:
        patient.append(local_files_only)
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert fetch_config(NAME) == tmp_path / "config.json"
    assert patient == [False] and len(server.asked) == 1


def test_what_is_in_the_cache_needs_no_answer(silent: Network, tmp_path: Path) -> None:
    held = cache(tmp_path)
    assert fetch_config(NAME) == held
    assert find_target(NAME, config_only=True).path == held.parent
    assert silent.asked == 2
    target_outline(NAME)
    assert silent.asked == 4, "the config and the index of weights"


def test_a_part_that_is_not_in_the_cache_is_missed_for_the_hubs_silence(
    silent: Network, tmp_path: Path
) -> None:
    cache(tmp_path)
    with pytest.raises(ConfigError, match=r"did not answer one request|no model\.safetensors"):
        TargetModel.from_pretrained(NAME)
    assert silent.asked == 1


def test_a_user_who_wants_no_network_has_none(silent: Network) -> None:
    with pytest.raises(ConfigError, match="hub could not give it"):
        find_target(NAME, local_files_only=True)
    assert silent.asked == 0


def test_a_draft_of_no_name_or_folder_is_refused_before_the_target_is_loaded(
    network: Network, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(TargetModel, "from_pretrained", None)
    for draft in (NAME, "/no/such", tmp_path / "none"):
        with pytest.raises(ConfigError, match="no such folder"):
            Engine.from_pretrained(draft=draft, max_context_len=64, num_pages=16)
    assert network.asked == 1


def test_a_name_that_the_hub_cannot_have_is_not_asked_for(network: Network) -> None:
    with pytest.raises(ConfigError, match="no model at '-/-': there is no such folder"):
        find_target("-/-")
    assert network.asked == 0
