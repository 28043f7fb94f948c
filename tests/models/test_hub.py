"""Laws of a target from the hub: only needed files are fetched, and a failure is one error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("transformers")
huggingface_hub = pytest.importorskip("huggingface_hub")

from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError  # noqa: E402
from huggingface_hub.utils import filter_repo_objects  # noqa: E402

from specpool import ConfigError, Engine, SamplingParams  # noqa: E402
from specpool.engine.assets import resolve  # noqa: E402
from specpool.engine.models import TargetModel  # noqa: E402
from specpool.engine.models.target_folder import find_target  # noqa: E402
from specpool.errors import CheckpointError  # noqa: E402

NAME = "somebody/model"


class Hub:
    """A repository in a folder; fetches as the hub's client does, and keeps what it was asked."""

    def __init__(self, path: Path, cache: Path) -> None:
        self.path, self.cache = path, cache
        self.asked: list[dict[str, Any]] = []
        self.error: BaseException | None = None

    def download(self, name: str, **asked: Any) -> str:
        assert name == NAME
        self.asked.append(asked)
        if self.error is not None:
            raise self.error
        files = [
            file.relative_to(self.path).as_posix()
            for file in self.path.rglob("*")
            if file.is_file()
        ]
        wanted = asked["allow_patterns"], asked["ignore_patterns"]
        for file in filter_repo_objects(files, allow_patterns=wanted[0], ignore_patterns=wanted[1]):
            (self.cache / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.path / file, self.cache / file)
        return str(self.cache)

    @property
    def fetched(self) -> set[str]:
        return {
            file.relative_to(self.cache).as_posix()
            for file in self.cache.rglob("*")
            if file.is_file()
        }


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The shipped target, with what a repository may hold besides."""
    path = Path(shutil.copytree(resolve("specpool/tiny"), tmp_path / "repository"))
    (tmp_path / "cache").mkdir()
    for extra in ("own.py", "pytorch_model.bin", "weights.gguf", "onnx/config.json", "a/b/x.json"):
        (path / extra).parent.mkdir(parents=True, exist_ok=True)
        (path / extra).write_text("no json, no weights")
    hub = Hub(path, tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.download)
    return hub


def sharded(hub: Hub, **weight_map: Any) -> None:
    (hub.path / "model.safetensors").unlink()
    index = {"weight_map": weight_map}
    (hub.path / "model.safetensors.index.json").write_text(json.dumps(index))


def test_only_what_is_read_is_fetched_and_it_runs(hub: Hub) -> None:
    with Engine.from_pretrained(NAME, max_context_len=64, num_pages=16) as engine:
        params = SamplingParams(max_new_tokens=3, ignore_eos=True)
        assert len(engine.generate([[5, 6]], params)[0].token_ids) == 3
    texts = {p.name for p in hub.path.iterdir() if p.suffix in (".json", ".txt", ".jinja")}
    assert hub.fetched == texts | {"model.safetensors"}


def test_a_revision_and_the_network_are_the_users_choice(hub: Hub) -> None:
    TargetModel.from_pretrained(NAME, revision="v1.2", local_files_only=True).close()
    assert len(hub.asked) == 2
    for asked in hub.asked:
        assert (asked["revision"], asked["local_files_only"]) == ("v1.2", True)


def test_code_is_fetched_only_if_the_user_says_so(hub: Hub) -> None:
    find_target(NAME)
    assert "own.py" not in hub.fetched
    find_target(NAME, trust_remote_code=True)
    assert "own.py" in hub.fetched


def test_an_mtp_layer_beside_the_weights_is_fetched_if_it_drafts(hub: Hub) -> None:
    (hub.path / "model_mtp.safetensors").write_bytes(b"x")
    find_target(NAME)
    assert "model_mtp.safetensors" not in hub.fetched
    find_target(NAME, with_mtp=True)
    assert "model_mtp.safetensors" in hub.fetched


def test_a_config_alone_is_fetched_alone(hub: Hub) -> None:
    sharded(hub, a="model.safetensors")
    find_target(NAME, config_only=True)
    assert hub.fetched == {"config.json", "model.safetensors.index.json"}


def test_shards_are_fetched_by_their_names(hub: Hub) -> None:
    sharded(hub, a="model-1.safetensors", b="model-2.safetensors", c="model-1.safetensors", d=7)
    for shard in ("model-1.safetensors", "model-2.safetensors", "model-3.safetensors"):
        (hub.path / shard).write_bytes(b"x")
    find_target(NAME)
    weights = {file for file in hub.fetched if file.endswith((".safetensors", ".bin"))}
    assert weights == {"model-1.safetensors", "model-2.safetensors"}


def test_a_whole_file_goes_before_an_index(hub: Hub) -> None:
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (hub.path / "model.safetensors.index.json").write_text(json.dumps(index))
    TargetModel.from_pretrained(NAME).close()
    assert "model.safetensors" in hub.fetched


@pytest.mark.parametrize("name", ["*", "*.py", "weights.ggu?", "[a-z]*", "onnx/*", "../x", ""])
def test_an_index_names_files_and_no_patterns(hub: Hub, name: str) -> None:
    """As patterns, a hostile index could fetch everything, or code."""
    sharded(hub, a=name)
    with pytest.raises(CheckpointError):
        TargetModel.from_pretrained(NAME)
    assert hub.fetched.isdisjoint({"own.py", "weights.gguf", "model.safetensors"})
    assert not any("/" in file for file in hub.fetched)


@pytest.mark.parametrize("content", ["[" * 99999, "[]", '{"weight_map": 5}', "\xff{", "{}"])
def test_an_index_that_is_none_is_one_error(hub: Hub, content: str) -> None:
    sharded(hub)
    (hub.path / "model.safetensors.index.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError) as caught:
        TargetModel.from_pretrained(NAME)
    assert "\n" not in str(caught.value) and "index.json" in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("offline,\nand not in the cache"),
        OSError(28, "No space left on device"),
        TimeoutError("timed out"),
        RuntimeError("x" * 100_000),
        MemoryError(),
        RepositoryNotFoundError("404 Client Error", response=Mock()),
    ],
    ids=lambda error: str(error)[:10],
)
def test_whatever_the_hub_raises_is_one_error_with_its_cause(hub: Hub, error: Any) -> None:
    hub.error = error
    with pytest.raises(ConfigError, match=f"no model at '{NAME}'.*the hub could not") as caught:
        TargetModel.from_pretrained(NAME)
    assert caught.value.__cause__ is error
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_a_download_that_is_stopped_is_stopped(hub: Hub) -> None:
    hub.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        TargetModel.from_pretrained(NAME)


def test_a_repository_without_a_model_is_one_error(hub: Hub) -> None:
    (hub.path / "config.json").unlink()
    with pytest.raises(ConfigError, match=f"no model at '{NAME}': the hub has no config.json"):
        TargetModel.from_pretrained(NAME)
