"""`python -m lab.engines.plants ENGINE`: plants faults into a running engine, for its laws to find.

Each plant spoils the engine, or the device, from some turn of a clean case on. What comes of it is
printed, a JSON object for each plant, and one for the case without a plant.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from lab.engines.case import Case, Verb
from lab.engines.server import guarded, load

#: Turns after which a plant is tried, until it says that it is done.
FIRST = 4
Plant = Callable[[Any], bool]


def planted(kind: Any, plant: Plant) -> None:
    """Let every run of a class of loops try a plant each turn, until it is done."""
    turn = kind.turn

    def spoilt(loop: Any) -> Any:
        if loop.tick >= FIRST and not loop.__dict__.get("is_spoilt"):
            loop.is_spoilt = plant(loop)
        return turn(loop)

    kind.turn = spoilt


def _sglang() -> tuple[Case, Any, dict[str, Plant]]:
    import torch
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    from lab.engines.sglang_cases import PLAIN
    from lab.engines.sglang_loop import NewestPlayer

    def running(player: Any) -> Any:
        reqs = [req for req in player.loop.running_batch.reqs if req.kv.holds_kv]
        return reqs[0] if reqs and reqs[0].output_ids else None

    def leaf(player: Any) -> Any:
        nodes = [node for _, node, _, _ in player.accounts._nodes()]
        return nodes[-1].component_data[ComponentType.FULL] if nodes else None

    def own_slots(player: Any) -> Any:
        kv = running(player).kv
        return player.loop.req_to_token_pool.req_to_token[
            kv.req_pool_idx, kv.cache_protected_len : kv.kv_allocated_len
        ]

    def full(player: Any) -> Any:
        return player.loop.token_to_kv_pool_allocator.full_attn_allocator

    def lose_page(player: Any) -> bool:
        allocator = full(player)
        allocator.free_pages = allocator.free_pages[1:]
        return True

    def lose_row(player: Any) -> bool:
        player.loop.req_to_token_pool.free_slots.pop()
        return True

    def lose_window_page(player: Any) -> bool:
        allocator = player.loop.token_to_kv_pool_allocator.swa_attn_allocator
        allocator.free_pages = allocator.free_pages[1:]
        return True

    def lose_state(player: Any) -> bool:
        allocator = player.loop.req_to_token_pool.mamba_allocator
        allocator.free_slots = allocator.free_slots[1:]
        return True

    def spoil_window(player: Any) -> bool:
        if running(player) is not None:
            device = player.loop.simulated
            device.window.held[device.mapped(own_slots(player)[:1].numpy())] = 5
        return running(player) is not None

    def spoil_state(player: Any) -> bool:
        if running(player) is not None:
            player.loop.req_to_token_pool.mamba_pool.mamba_cache.temporal[:] = 5
        return running(player) is not None

    def lock_window_twice(player: Any) -> bool:
        nodes = [node for _, node, _, _ in player.accounts._nodes()]
        if nodes:
            nodes[-1].component_data[ComponentType.SWA].lock_ref += 1
        return bool(nodes)

    def free_twice(player: Any) -> bool:
        allocator = full(player)
        allocator.free(allocator.free_pages[:1].clone())
        return True

    def spoil_slot(player: Any) -> bool:
        if running(player) is not None:
            player.loop.simulated.target.held[own_slots(player)[:1].numpy()] = 5
        return running(player) is not None

    def spoil_cache(player: Any) -> bool:
        data = leaf(player)
        if data is not None:
            player.loop.simulated.target.held[data.value[-1:].numpy()] = 5
        return data is not None

    def share_row(player: Any) -> bool:
        if running(player) is not None:
            own_slots(player)[-1] = full(player).free_pages[0]
        return running(player) is not None

    def commit_more(player: Any) -> bool:
        if running(player) is not None:
            running(player).kv.kv_committed_len = running(player).kv.kv_allocated_len + 1
        return running(player) is not None

    def say_more(player: Any) -> bool:
        if running(player) is not None:
            running(player).output_ids[0] += 1
        return running(player) is not None

    def run_nothing(player: Any) -> bool:
        player.loop._get_new_batch_prefill_raw = lambda running_batch, **_: (None, running_batch)
        return True

    def lose_requests(player: Any) -> bool:
        player.loop._add_request_to_queue = lambda *_, **__: None
        return True

    def lock_twice(player: Any) -> bool:
        data = leaf(player)
        if data is not None:
            data.lock_ref += 1
        return data is not None

    def admit_all(player: Any) -> bool:
        allocator = full(player)
        allocator.free(torch.empty(0, dtype=torch.int64))
        allocator.available_size = lambda: allocator.size
        allocator.free_pages, allocator.release_pages = allocator.free_pages[:0], torch.empty(0)
        return True

    def stop(player: Any) -> bool:
        def run_batch(*_: Any, **__: Any) -> Any:
            raise RuntimeError("planted")

        player.loop.run_batch = run_batch
        return True

    settings: dict[str, Any] = PLAIN | {"sessions": 0, "num_tokens": 256}
    settings |= {"window": 8, "window_tokens": 128}
    settings |= {"states": 32, "strategy": "extra_buffer", "grain": 4, "interval": 16}
    verbs = [
        Verb(at, "send", {"number": at, "stem": 0, "shared": 20, "length": 30, "most": 20})
        for at in (1, 2, 8, 40)
    ]
    return (
        Case("sglang", "states", 1, settings, tuple(verbs)),
        NewestPlayer,
        {
            "conservation": lose_page,
            "conservation of a window's pages": lose_window_page,
            "conservation of states": lose_state,
            "conservation of rows": lose_row,
            "one owner": free_twice,
            "content": spoil_slot,
            "content of a window": spoil_window,
            "cache truth": spoil_cache,
            "states": spoil_state,
            "rows": share_row,
            "lengths": commit_more,
            "text": say_more,
            "progress": run_nothing,
            "progress of a lost request": lose_requests,
            "locks": lock_twice,
            "locks of a window": lock_window_twice,
            "admission": admit_all,
            "exception": stop,
        },
    )


def _vllm() -> tuple[Case, Any, dict[str, Plant]]:
    from lab.engines.vllm_cases import PLAIN
    from lab.engines.vllm_loop import VllmLoop

    def spoil_state(loop: Any) -> bool:
        if running(loop) is not None:
            loop.worker.states.memory.keys[:] = 5
        return running(loop) is not None

    def running(loop: Any) -> Any:
        return loop.scheduler.running[0] if loop.scheduler.running else None

    def own_blocks(loop: Any) -> list[int]:
        return list(loop._rows()[running(loop).request_id][0])

    def free_blocks(loop: Any) -> list[Any]:
        return list(loop.pool.free_block_queue.get_all_free_blocks())

    def lose_block(loop: Any) -> bool:
        loop.pool.free_block_queue.popleft()
        return True

    def free_twice(loop: Any) -> bool:
        loop.pool.free_blocks([free_blocks(loop)[-1]])
        return True

    def spoil_slot(loop: Any) -> bool:
        if running(loop) is not None:
            loop.worker.target.keys[own_blocks(loop)[-1]] = 5
        return running(loop) is not None

    def spoil_cache(loop: Any) -> bool:
        cached = [block.block_id for block in free_blocks(loop) if block.block_hash is not None]
        for memory in (loop.worker.target, loop.worker.states.memory):
            memory.keys[cached] = 5
        return bool(cached)

    def forget_block(loop: Any) -> bool:
        if running(loop) is not None:
            manager = loop.manager.coordinator.single_type_managers[0]
            manager.req_to_blocks[running(loop).request_id].pop()
        return running(loop) is not None

    def take_placeholder(loop: Any) -> bool:
        if running(loop) is not None:
            running(loop).num_output_placeholders = -1
        return running(loop) is not None

    def say_less(loop: Any) -> bool:
        update = loop.scheduler.update_from_output

        def forgetful(*args: Any) -> Any:
            outputs = update(*args)
            for part in outputs.values():
                for said in part.outputs:
                    said.new_token_ids = said.new_token_ids[1:]
            return outputs

        loop.scheduler.update_from_output = forgetful
        return True

    def run_nothing(loop: Any) -> bool:
        loop.manager.allocate_slots = lambda *_, **__: None
        return True

    def hit_nothing(loop: Any) -> bool:
        loop.pool.get_cached_block = lambda *_, **__: None
        return True

    def stop(loop: Any) -> bool:
        def schedule(*_: Any, **__: Any) -> Any:
            raise RuntimeError("planted")

        loop.scheduler.schedule = schedule
        return True

    def encode_nothing(loop: Any) -> bool:
        loop.scheduler.encoder_cache_manager.check_and_update_cache = lambda *_: True
        return True

    def lose_slot(loop: Any) -> bool:
        loop.scheduler.encoder_cache_manager.num_free_slots -= 1
        return True

    def hold_output(loop: Any) -> bool:
        loop.scheduler.encoder_cache_manager.free_encoder_input = lambda *_: None
        return True

    groups = [{"kind": kind, "block": 4} for kind in ("full", "states")]
    images = {"most": 4, "budget": 4, "cache": 8, "whole": False}
    settings = PLAIN | {"groups": groups, "connector": None, "images": images}
    given = {"stem": 0, "shared": 20, "length": 30, "most": 20}
    verbs = [
        Verb(at, "send", {"number": at, **given, "images": [[22, 4, at]]}) for at in (1, 2, 8, 40)
    ]
    return (
        Case("vllm", "plain", 1, settings, tuple(verbs)),
        VllmLoop,
        {
            "conservation": lose_block,
            "conservation of the encoder's slots": lose_slot,
            "conservation of the encoder's outputs": hold_output,
            "one owner": free_twice,
            "content": spoil_slot,
            "content of an encoder's output": encode_nothing,
            "cache truth": spoil_cache,
            "states": spoil_state,
            "rows": forget_block,
            "lengths": take_placeholder,
            "text": say_less,
            "progress": run_nothing,
            "usefulness": hit_nothing,
            "exception": stop,
        },
    )


def main() -> None:
    """Run the clean case, then one with each plant; print the laws that are broken, in order."""
    engine = sys.argv[1].partition("-")[0]
    run = guarded(sys.argv[1], load(engine).run)
    case, kind, plants = _sglang() if engine == "sglang" else _vllm()
    turn = kind.turn
    for name, plant in {"": None, **plants}.items():
        kind.turn = turn
        if plant is not None:
            planted(kind, plant)
        laws = list(dict.fromkeys(finding.law for finding in run(case)))
        print(json.dumps({"plant": name, "laws": laws}), flush=True)


if __name__ == "__main__":
    main()
