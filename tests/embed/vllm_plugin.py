"""What the tests on the real vLLM share: the plug-in at its highest level, and its pool."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import plugins

from benches.vllm_setup import admit, manager, request

SIZE = 4


@pytest.fixture(autouse=True, scope="module")
def with_plugin() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECPOOL_VLLM", "speculative")
        patch.setenv("VLLM_PLUGINS", "specpool")
        plugins.load_general_plugins()


def ours() -> Any:
    from specpool.plugins.vllm import pool

    return pool.SpecpoolBlockPool


def held(num_blocks: int = 8, **settings: Any) -> tuple[Any, list[Any]]:
    """Return a pool and the blocks of request "r", three of them."""
    managed = manager(ours(), num_blocks, SIZE, **settings)
    assert admit(managed, request("r", range(11), SIZE)) == [0, 1, 2, 3]
    return managed.block_pool, managed.get_blocks("r").blocks[0]
