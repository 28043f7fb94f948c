"""The plug-in's level `speculative` on the real vLLM; `test_vllm.py` runs it in a new process."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from vllm_plugin import SIZE, ours, with_plugin

from benches.vllm_setup import OWN_POOL, admit, drafter, manager, request, scheduler

__all__ = ["with_plugin"]


def decode(managed: Any, wanted: Any, tokens: list[int]) -> None:
    """Rounds that accept one token each."""
    for token in tokens:
        assert managed.allocate_slots(wanted, 1, num_lookahead_tokens=1) is not None
        wanted.append_output_token_ids(token)
        wanted.num_computed_tokens = wanted.num_tokens - 1


def eagle(pool: Any, **settings: Any) -> Any:
    return manager(pool, 64, SIZE, use_eagle=True, **settings)


@pytest.mark.parametrize("behind", [7, 8])
def test_a_hit_keeps_its_last_block_if_the_text_goes_on_alike(behind: int) -> None:
    """The token behind two whole blocks decides, because the draft KV of position 7 has read it."""
    for cls, hit in ((OWN_POOL, SIZE), (ours(), 2 * SIZE if behind == 8 else SIZE)):
        managed = eagle(cls)
        admit(managed, request("a", range(9), SIZE))  # 0..8: the token behind block 1 is 8
        got = admit(managed, request("b", [*range(8), behind, 5], SIZE))
        assert got is not None and got[0] == hit


def test_a_token_that_is_sampled_later_proves_as_well() -> None:
    managed = eagle(ours())
    first = request("a", range(6), SIZE)
    admit(managed, first)
    decode(managed, first, [6, 7, 8, 9])  # block 1 fills up before token 8 is known
    managed.free(first)
    text = [*range(9), 1]
    assert admit(managed, request("b", text, SIZE))[0] == 2 * SIZE
    # Of two blocks with the same content, the one whose text went on alike is taken.
    managed = eagle(ours())
    for name, behind in (("a", 8), ("b", 7)):
        admit(managed, request(name, [*range(8), behind, behind, 1], SIZE))
    for name, behind in (("c", 8), ("d", 7)):
        other = request(name, [*range(8), behind, 3, 3], SIZE)
        got = admit(managed, other)
        assert got is not None and got[0] == 2 * SIZE
        assert got[2] == managed.get_block_ids("ab"["cd".index(name)])[0][1]


def test_a_block_that_is_not_cached_has_no_note() -> None:
    """A note would outlive what the block holds, and prove another text."""
    pool = eagle(ours()).block_pool
    new = pool.get_new_blocks(3)
    wanted = request("a", range(12), SIZE)
    pool.cache_full_blocks(wanted, new, 0, 3, SIZE, 0, [True, False, False])
    assert [pool.next_tokens.of(block.block_id) for block in new] == [4, None, None]


def test_what_is_not_proved_is_dropped_as_vllm_does() -> None:
    text = [*range(9), 1]

    def hit(writer: Any, reader: Any = None, **settings: Any) -> int:
        managed = eagle(ours())
        admit(managed, writer, **settings)
        return admit(managed, reader or request("b", text, SIZE))[0]

    assert hit(request("a", range(9), SIZE)) == 2 * SIZE
    assert hit(request("a", range(8), SIZE)) == SIZE  # it never had a next token
    assert hit(request("a", range(9), SIZE, resumable=True)) == SIZE
    feature = SimpleNamespace(identifier="x", mm_position=SimpleNamespace(offset=8, length=1))
    seen = request("a", range(9), SIZE)
    seen.mm_features = [feature]  # behind block 1 an image begins: its tokens say nothing of it
    assert _unproved(seen)
    # Blocks that another engine filled.
    managed = eagle(ours())
    loaded = request("a", range(9), SIZE)
    managed.allocate_slots(loaded, 1, num_external_computed_tokens=8, num_lookahead_tokens=1)
    loaded.num_computed_tokens = 9
    assert admit(managed, request("b", text, SIZE))[0] == SIZE
    decode(managed, loaded, [9, 10, 11, 12, 13])  # this engine computes block 2 itself
    assert admit(managed, request("c", range(14), SIZE))[0] == 3 * SIZE
    # They are of no other request, and of none that computes them again.
    managed.free(loaded)
    managed.evict_blocks(set(range(1, 64)))
    loaded.num_computed_tokens = 0
    admit(managed, loaded)
    assert managed.get_computed_blocks(request("d", text, SIZE))[1] == 2 * SIZE


def test_a_preempted_request_proves_nothing_of_a_block_that_it_lost() -> None:
    managed = eagle(ours())
    first = request("a", range(8), SIZE)
    admit(managed, first)  # block 1 is full, and token 8 unknown
    (lost,) = managed.get_block_ids("a")[0][1:]
    managed.free(first)
    pool = managed.block_pool
    others = pool.get_new_blocks(pool.get_num_free_blocks())
    assert len(pool.next_tokens) == 0
    pool.free_blocks([block for block in others if block.block_id != lost])
    first.append_output_token_ids(8)
    first.num_computed_tokens = 0
    admit(managed, first)
    assert pool.next_tokens.of(lost) is None


def _unproved(wanted: Any) -> bool:
    from specpool.plugins.vllm import speculative

    return not speculative._is_provable(wanted)


def test_a_block_that_was_given_again_proves_nothing() -> None:
    managed = eagle(ours())
    pool = managed.block_pool
    first = request("a", range(9), SIZE)
    admit(managed, first)
    managed.free(first)
    assert [pool.next_tokens.of(block) for block in (1, 2)] == [4, 8]
    pool.get_new_blocks(pool.get_num_free_blocks())
    assert len(pool.next_tokens) == 0


def fill(managed: Any, name: str = "a") -> Any:
    """Admit a request whose second block is full, with no token behind it yet; return it."""
    wanted = request(name, range(2 * SIZE), SIZE)
    admit(managed, wanted)
    return wanted


def hit(managed: Any, behind: int) -> int:
    """Return the tokens that are found of the text of `fill` that goes on with `behind`."""
    known: int = managed.get_computed_blocks(request("b", [*range(2 * SIZE), behind, 0], SIZE))[1]
    return known


@pytest.mark.parametrize("last", [7, 8])
def test_a_hit_is_looked_up_once_and_without_a_proof_is_vllms(last: int) -> None:
    answers = []
    for cls in (OWN_POOL, ours()):
        managed = eagle(cls)
        admit(managed, request("a", [*range(3 * SIZE), 7], SIZE))
        pool, wanted = managed.block_pool, request("b", [*range(3 * SIZE), last], SIZE)
        pool.get_cached_block = Mock(wraps=pool.get_cached_block)
        blocks, known, _ = managed.get_computed_blocks(wanted)
        assert pool.get_cached_block.call_count == 3
        answers.append((blocks.get_block_ids(), known))
    dropped, proved = answers
    assert dropped == (([1, 2],), 2 * SIZE)
    assert proved == ((([1, 2, 3],), 3 * SIZE) if last == 7 else dropped)


@pytest.mark.parametrize("is_freed", [False, True])
def test_a_token_proves_as_soon_as_it_is_sampled_and_after_its_request(is_freed: bool) -> None:
    managed = eagle(ours())
    wanted = fill(managed)
    assert hit(managed, 7) == SIZE
    wanted.append_output_token_ids(7)
    if is_freed:
        managed.free(wanted)
        wanted.append_output_token_ids(8)
    assert [hit(managed, behind) for behind in (7, 8)] == [2 * SIZE, SIZE]


def test_what_a_request_samples_after_it_was_preempted_proves_nothing_of_a_block_before() -> None:
    """The step that was in flight then computed the draft KV with another token."""
    managed = eagle(ours())
    wanted = fill(managed)
    managed.free(wanted)
    wanted.append_output_token_ids(7)
    wanted.num_computed_tokens = 0
    assert hit(managed, 7) == SIZE
    assert admit(managed, wanted)[0] == SIZE
    decode(managed, wanted, [9])
    assert hit(managed, 7) == 2 * SIZE  # by the block that it computed again
    assert len(managed.block_pool.next_tokens) == 2


def test_an_open_note_is_of_what_its_block_held_then() -> None:
    """A block is taken away by a wrong free, and holds another text with the same token behind."""
    managed = eagle(ours())
    pool = managed.block_pool
    wanted = fill(managed)
    block = pool.blocks[managed.get_block_ids("a")[0][1]]
    pool.free_blocks([block])
    foreign = request("c", range(50, 50 + SIZE), SIZE)
    assert pool.get_new_blocks(pool.get_num_free_blocks())[-1] is block
    pool.cache_full_blocks(foreign, [block], 0, 1, SIZE, 0)
    wanted.append_output_token_ids(7)
    pool.next_tokens.let_go("a")
    assert pool.next_tokens.of(block.block_id) is None
    foreign.append_output_token_ids(8)
    assert pool.next_tokens.of(block.block_id) == 8


def test_a_note_keeps_no_text_alive() -> None:
    managed = eagle(ours())
    wanted = weakref.ref(fill(managed))
    assert wanted() is not None  # while it holds the block
    decode(managed, wanted(), [*range(SIZE)] * 2)  # more blocks are full before a token is behind
    managed.free(wanted())
    assert wanted() is None


def test_where_the_next_token_does_not_prove_a_hit_nothing_is_noted() -> None:
    managed = manager(ours(), 64, SIZE, num_hash_lookahead_tokens=1)
    assert managed.block_pool.next_tokens is None
    window = manager(ours(), 64, SIZE, use_eagle=True, window=8)
    assert window.block_pool.next_tokens is None
    # Modules that read two tokens ahead need more than the next one.
    several = eagle(ours(), num_prefill_lookahead=2)
    assert several.block_pool.next_tokens is None
    assert eagle(ours(), num_prefill_lookahead=1).block_pool.next_tokens is not None


def lookahead(num_lookahead_tokens: int = 5, **changes: Any) -> int:
    """Return what a scheduler reserves then for a request."""
    made = scheduler(manager(ours(), 8, SIZE), num_lookahead_tokens, **changes)
    left: int = made.num_lookahead_tokens
    return left


def test_the_spare_slot_is_of_drafters_that_write_step_by_step() -> None:
    assert [lookahead(method=method) for method in ("eagle", "eagle3", "mtp")] == [4, 4, 4]
    for changes in (
        {"method": "draft_model"},  # its first step reads a token further on
        {"method": "dflash"},
        {"parallel_drafting": True},
        {"use_multi_module_mtp": lambda: True},
        {"use_gemma4_mtp": lambda: True},
        {"use_step3p5_mtp": lambda: True},
    ):
        assert lookahead(**changes) == 5, changes
    assert lookahead(0) == 0


def test_a_scheduler_reserves_less_as_soon_as_it_is_made() -> None:
    """And counts what its running requests do not reserve; without a drafter it stays as it is."""
    from specpool.plugins.vllm import speculative

    for num_steps in (0, 3):
        made = scheduler(managed := manager(ours(), 40, SIZE), 0)
        made.num_lookahead_tokens = num_steps
        spec = drafter() if num_steps else None
        before = speculative._num_spare_slots()
        speculative._init_scheduler(
            lambda *args: None, made, SimpleNamespace(speculative_config=spec)
        )
        assert made.num_lookahead_tokens == max(0, num_steps - 1)
        for name in "ab":
            admit(managed, request(name, range(9), SIZE))
        assert speculative._num_spare_slots() - before == (2 if num_steps else 0)


def test_what_stays_vllms_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specpool.plugins import status

    monkeypatch.setattr(status, "_statuses", {})
    for changes in (
        {},
        {"num_lookahead_tokens": 0, "method": "ngram"},
        {"method": "draft_model"},
        {"method": "draft_model"},
        {"parallel_drafting": True},
        {"use_step3p5_mtp": lambda: True},
    ):
        lookahead(**changes)
    assert [line.split(": ", 2)[2] for line in caplog.messages] == [
        "drafter 'draft_model' writes elsewhere than eagle, eagle3, mtp do",
        "parallel drafting writes the positions of all drafts in one forward",
        "MTP of several modules writes windows of its own, or elsewhere",
    ]
    caplog.clear()
    manager(ours(), 8, SIZE)
    manager(ours(), 8, SIZE, use_eagle=True, enable_caching=False)
    managed = manager(ours(), 8, SIZE, use_eagle=True)
    assert caplog.messages == []
    for _ in "ab":
        manager(ours(), 8, SIZE, use_eagle=True, window=2 * SIZE)
    manager(OWN_POOL, 8, SIZE, use_eagle=True)
    image = request("i", range(9), SIZE)
    image.resumable = True
    managed.get_computed_blocks(image)
    managed.get_computed_blocks(image)
    managed.allocate_slots(request("x", range(9), SIZE), 1, num_external_computed_tokens=SIZE)
    said = [line.removeprefix("specpool: ") for line in caplog.messages]
    assert said[:2] == [
        "hits drop their last block, as vLLM's do: the model has several groups of KV",
        "hits drop their last block, as vLLM's do: the pool is a BlockPool",
    ]
    assert [line.split(" ", 2)[:2] for line in said[2:]] == [["requests", "with"], ["a", "block"]]


@pytest.mark.parametrize("num_steps", [1, 2, 5])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_round_has_the_slots_that_its_drafter_writes_and_no_block_more(
    num_steps: int, block_size: int
) -> None:
    for start in range(1, 2 * block_size + 1):
        managed = manager(ours(), 64, block_size)
        reserved = scheduler(managed, num_steps).num_lookahead_tokens
        wanted = request("r", range(start), block_size)
        admit(managed, wanted, num_lookahead_tokens=reserved)
        wanted.append_output_token_ids(1)
        drafts = num_steps
        managed.allocate_slots(wanted, 1 + drafts, num_lookahead_tokens=reserved)
        verified = wanted.num_computed_tokens + drafts  # the last position the target verifies
        # vLLM's drafter: the verified positions, then one further with each later step.
        last = verified + len(range(num_steps - 1))
        blocks = managed.get_block_ids("r")[0]
        assert len(blocks) == last // block_size + 1


def test_a_stale_hit_and_none_at_all_are_refused_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    from specpool.plugins.vllm import speculative, speculative_proof
    from specpool.plugins.vllm.next_tokens import NextTokens

    assert speculative_proof.difference() is None
    monkeypatch.setattr(speculative, "_proved", lambda pool, block, token: block)
    line = speculative_proof.difference()
    assert line is not None and line.startswith("KV cache hits, seed ")
    assert "the last block was computed for another text" in line
    monkeypatch.undo()
    monkeypatch.setattr(NextTokens, "let_go", lambda self, request_id: None)  # open for ever
    line = speculative_proof.difference()
    assert line is not None and "the last block was computed for another text" in line
    monkeypatch.undo()
    monkeypatch.setattr(speculative, "_proved", lambda pool, block, token: None)
    assert speculative_proof.difference() == (
        "KV cache hits: no operation of the proof kept the last block of a hit"
    )


def test_drafters_of_another_text_keep_vllms_reserve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from specpool.plugins.vllm import drafters, speculative

    target = next(iter(drafters.DRAFTERS))
    monkeypatch.setitem(drafters.DRAFTERS, target, {"0.33.0": "another"})
    speculative._unknown_drafters.cache_clear()
    assert lookahead(0) == 0
    assert caplog.messages == []  # such a drafter costs no slot
    for trusted, left in ((None, 5), ("trust", 4)):
        speculative._unknown_drafters.cache_clear()
        if trusted:
            monkeypatch.setenv("SPECPOOL_VLLM_DRIFT", trusted)
        assert lookahead() == left
    speculative._unknown_drafters.cache_clear()
    (line,) = caplog.messages
    assert "a round reserves as much as vLLM does: " + target in line
