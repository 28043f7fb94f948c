"""How much memory an engine reckons with, and when it takes it."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from specpool import ConfigError  # noqa: E402
from specpool._core import Group, Ledger, Shape  # noqa: E402
from specpool.engine.memory import pools as memory  # noqa: E402
from specpool.engine.memory.kv_cache import KVCache, LayerKV  # noqa: E402
from specpool.engine.models.recurrent import (  # noqa: E402
    MixerSpec,
    RecurrentState,
    StateSpec,
)

CPU = torch.device("cpu")
MIB = 1 << 20
_STATE_OPTIONS = "kv_bytes, max_batch, max_sessions or cached_states"


def limits(folder: Path, names: tuple[str, str, str], values: tuple[str, int, int]) -> None:
    """Write the files of one control group: limit, memory in use, and cached files among it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{values[0]}\n")
    (folder / names[1]).write_text(f"{values[1]}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {values[2]}\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(memory, "_free_bytes_of_host", lambda: 1000 * MIB)
    return tmp_path / "cgroup"


@pytest.mark.parametrize("own", ["0::/pod/app\n", "0::/\n", "3:cpu:/\n0::/elsewhere\n"])
def test_a_container_limit_counts(groups: Path, own: str) -> None:
    groups.with_name("own").write_text(own)
    limits(groups, V2, (str(300 * MIB), 200 * MIB, 50 * MIB))
    limits(groups / "pod" / "app", V2, ("max", 100 * MIB, 0))
    assert memory.free_bytes(CPU) == 150 * MIB


def test_the_narrowest_of_nested_limits_counts(groups: Path) -> None:
    groups.with_name("own").write_text("0::/pod/app\n")
    limits(groups / "pod", V2, (str(300 * MIB), 100 * MIB, 0))
    limits(groups / "pod" / "app", V2, (str(90 * MIB), 100 * MIB, 0))
    assert memory.free_bytes(CPU) == 0


def test_limits_of_the_older_version(groups: Path) -> None:
    groups.with_name("own").write_text("7:cpu,cpuacct:/\n5:memory:/docker/0\n")
    limits(groups / "memory", V1, (str(1 << 62), 10, 0))
    limits(groups / "memory" / "docker" / "0", V1, (str(80 * MIB), 30 * MIB, 10 * MIB))
    assert memory.free_bytes(CPU) == 60 * MIB


def test_without_a_limit_the_host_decides(groups: Path) -> None:
    assert memory.free_bytes(CPU) == 1000 * MIB
    groups.with_name("own").write_text("0::/\n")
    assert memory.free_bytes(CPU) == 1000 * MIB


def num_resident(buffer: torch.Tensor) -> int:
    """Return the bytes of a buffer that the system has given memory, whatever else it gave."""
    page = os.sysconf("SC_PAGE_SIZE")
    start = buffer.data_ptr() // page * page
    num_pages = -(-(buffer.data_ptr() + buffer.nbytes - start) // page)
    is_there = (ctypes.c_ubyte * num_pages)()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert mincore(start, num_pages * page, is_there) == 0, os.strerror(ctypes.get_errno())
    return sum(byte & 1 for byte in is_there) * page


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says which pages have memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_are_zero_and_take_memory_when_they_are_written(dtype: torch.dtype) -> None:
    group = Group("kv", page_size=16, num_pages=1 << 14, hosts_drafts=True)
    ledger = Ledger([group], [Shape.none()], num_rows=1, max_context_len=64)
    layers = [LayerKV(2, 64, 64)] * 4
    cache = KVCache(ledger, layers, [0] * 4, dtype=dtype, device=CPU)
    assert cache.num_bytes >= 256 * MIB
    assert (
        sum(map(num_resident, (*cache.keys, *cache.values))) < cache.num_bytes // 2
    )  # huge pages may come whole
    touched = torch.ones(1 << 20)
    assert num_resident(touched) >= touched.nbytes
    for buffer in (cache.keys[0], cache.values[3]):
        assert buffer.dtype == dtype and buffer.shape == (16 * ((1 << 14) + 1), 2, 64)
        assert not buffer[::999].any()


def _kv_buffers(device: torch.device) -> object:
    group = Group("kv", page_size=16, num_pages=63)
    ledger = Ledger([group], [], num_rows=1, max_context_len=64)
    return KVCache(ledger, [LayerKV(2, 64, 64)], [0], dtype=torch.float16, device=device)


def _state_buffers(device: torch.device) -> object:
    specs = tuple(StateSpec(0, kind, 0, (32, 16), torch.float16) for kind in ("conv", "recurrent"))
    mixers = [MixerSpec(specs, width=64, dtype=torch.float16)]
    return RecurrentState(mixers, num_slots=63, num_rows=15, ring_len=32, device=device)


@pytest.mark.parametrize(
    ("buffers", "num_found", "missing", "options"),
    [
        (_kv_buffers, 1, "256 KiB of a layer's KV", "kv_bytes or num_pages"),
        (_state_buffers, 1, "64 KiB of a layer's states", _STATE_OPTIONS),
        (_state_buffers, 2, "64 KiB of a layer's records", _STATE_OPTIONS),
    ],
)
def test_a_device_that_another_process_fills(
    monkeypatch: pytest.MonkeyPatch,
    buffers: Callable[[torch.device], object],
    num_found: int,
    missing: str,
    options: str,
) -> None:
    """A later buffer finds no room; the error says of what, and what to do."""
    asked: list[tuple[int, ...]] = []

    def zeros(shape: tuple[int, ...], **options: object) -> torch.Tensor:
        asked.append(shape)
        if len(asked) > num_found:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...\nmore lines")
        return torch.empty(shape, dtype=torch.float16, device="meta")

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(ConfigError) as caught:
        buffers(torch.device("meta"))  # a device that is no CPU stands for a GPU
    assert str(caught.value) == (
        f"meta has no room for {missing}: another process uses the device too; lower {options}, or "
        "end that process"
    )
