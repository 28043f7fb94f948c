"""Laws of `BlockPool`, beside a plain pool of dicts and lists; refused calls change nothing."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specpool import (
    BlockPool,
    ConfigError,
    OrderError,
    OutOfPages,
    PageStateError,
    RecordError,
    ShapeError,
)
from specpool._core import Replay

Text = tuple[int, ...]


class PlainPool:
    """What `BlockPool` promises, in the plainest form: every query looks at everything."""

    def __init__(self, num_blocks: int, size: int, first_id: int) -> None:
        self.size, self.end = size, first_id + num_blocks
        self.fresh = first_id  # never taken from here on
        self.returned: list[int] = []  # the last one is taken first
        self.refs: dict[int, int] = {}
        self.fences: dict[int, int] = {}
        self.fenced: list[int] = []  # those whose content is not known
        self.waiting: list[int] = []  # those whose content is known
        self.cached: list[int] = []  # the first one goes first
        self.known: dict[tuple[bytes, Text], int] = {}  # salt and tokens from the start -> block
        self.kept: set[int] = set()  # blocks that an index of the caller's knows
        self.completed = 0

    def key_of(self, block: int) -> tuple[bytes, Text] | None:
        return next((key for key, each in self.known.items() if each == block), None)

    @property
    def num_free(self) -> int:
        return len(self.returned) + self.end - self.fresh

    def taken(self) -> list[int]:
        return sorted([*self.refs, *self.fenced, *self.waiting])

    def settle(self, block: int) -> None:
        for listed in (self.cached, self.waiting):
            if block in listed:
                listed.remove(block)
        if block in self.refs:
            return
        is_fenced = self.fences.get(block, 0) > self.completed
        is_known = self.key_of(block) or block in self.kept
        if is_fenced and block not in self.fenced:
            (self.waiting if is_known else self.fenced).append(block)
        elif not is_fenced:
            (self.cached if is_known else self.returned).append(block)

    def can_take(self, count: int, hold: list[int]) -> bool:
        return count <= self.num_free + len(set(self.cached) - set(hold))

    def take(self, count: int, hold: list[int]) -> list[int]:
        for block in hold:
            self.refs[block] = self.refs.get(block, 0) + 1
            self.settle(block)
        blocks = []
        for _ in range(count):
            while not self.num_free:
                self.evict()
            if self.returned:
                block = self.returned.pop()
            else:
                block, self.fresh = self.fresh, self.fresh + 1
            self.refs[block], self.fences[block] = 1, 0
            blocks.append(block)
        return blocks

    def evict(self) -> None:
        oldest = self.cached[0]
        if oldest in self.kept:
            self.unkeep([oldest])
        else:
            salt, text = self.key_of(oldest) or (b"", ())
            self.unknow(self.leaf(salt, text))

    def keep(self, blocks: list[int]) -> None:
        self.kept |= set(blocks)

    def unkeep(self, blocks: list[int]) -> None:
        for block in blocks:
            if block in self.kept:
                self.kept.remove(block)
                self.settle(block)

    def leaf(self, salt: bytes, text: Text) -> tuple[bytes, Text]:
        """The last of the texts that continue this one, piece by piece."""
        while True:
            longer = [
                other
                for each, other in self.known
                if each == salt
                and len(other) == len(text) + self.size
                and other[: len(text)] == text
            ]
            if not longer:
                return salt, text
            text = max(longer)

    def unknow(self, key: tuple[bytes, Text]) -> None:
        self.settle(self.known.pop(key))

    def drop(self, blocks: list[int], after: int) -> None:
        for block in reversed(blocks):
            self.refs[block] -= 1
            self.fences[block] = max(self.fences[block], after)
            if not self.refs[block]:
                del self.refs[block]
                self.settle(block)

    def match(self, tokens: list[int], salt: bytes) -> list[int]:
        ends = range(self.size, len(tokens) + 1, self.size)
        found = [self.known.get((salt, tuple(tokens[:end]))) for end in ends]
        return [b for b in found[: [*found, None].index(None)] if b is not None]

    def put(self, tokens: list[int], blocks: list[int], start: int, salt: bytes) -> list[int]:
        hit = self.match(tokens, salt)
        whole = len(tokens) // self.size
        for at in range(len(hit), whole):
            self.known[salt, tuple(tokens[: (at + 1) * self.size])] = blocks[at]
        for block in reversed(hit):
            if block in self.cached:
                self.settle(block)
        return self.match(tokens, salt)[start:]

    def forget(self, salt: bytes | None) -> None:
        for each in sorted({each for each, _ in self.known if salt in (None, each)}):
            while any(other == each for other, _ in self.known):
                self.unknow(self.leaf(each, ()))
        if salt is None:
            self.unkeep(sorted(self.kept))

    def complete(self, step: int) -> None:
        self.completed = step
        for listed in (self.fenced, self.waiting):
            over = [block for block in listed if self.fences[block] <= step]
            for block in over:
                listed.remove(block)
                self.settle(block)


class World:
    """Requests with random texts of common beginnings, over both pools."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.size, num_blocks = rng.choice([1, 2, 3, 16]), rng.randint(3, 40)
        first_id, self.fencing = rng.randint(0, 1), rng.random() < 0.5
        self.pool = BlockPool(num_blocks, self.size, first_id=first_id, fencing=self.fencing)
        self.plain = PlainPool(num_blocks, self.size, first_id)
        self.rows: list[tuple[list[int], list[int], int, bytes]] = []  # tokens, blocks, noted, salt
        self.step = 0

    def text(self) -> list[int]:
        num = self.rng.randint(0, 6 * self.size)
        tokens = [self.rng.choice([0, 0, 0, 1, 7]) for _ in range(num)]
        return [0] * min(num, self.rng.randint(0, 3) * self.size) + tokens

    def array(self, values: list[int]) -> Any:
        kind = self.rng.randrange(3)
        return values if kind == 0 else np.array(values, (np.int32, np.int64)[kind - 1])

    def come(self) -> None:
        tokens, salt = self.text(), self.rng.choice([b"", b"", b"a"])
        hit = self.pool.match(self.array(tokens), salt).tolist()
        assert hit == self.plain.match(tokens, salt)
        hold = hit[: self.rng.randint(0, len(hit))]
        count = -(-len(tokens) // self.size) - len(hold)
        fits = self.plain.can_take(count, hold)
        assert self.pool.fits(count, self.array(hold)) == fits
        if not fits:
            before = self.pool.state_hash()
            with pytest.raises(OutOfPages):
                self.pool.take(count, hold)
            assert self.pool.state_hash() == before
            return
        if self.rng.random() < 0.3:
            objects = [(block,) for block in range(self.pool.first_id + self.pool.num_blocks)]
            new = [block for (block,) in self.pool.take(count, self.array(hold), "r", objects)]
        else:
            taken = self.pool.take(count, self.array(hold), tag="r", int64=self.rng.random() < 0.5)
            assert taken.dtype in (np.int32, np.int64)
            new = taken.tolist()
        assert new == self.plain.take(count, hold)
        self.rows.append((tokens, hold + new, len(hold), salt))

    def note(self) -> None:
        if not self.rows:
            return
        at = self.rng.randrange(len(self.rows))
        tokens, blocks, noted, salt = self.rows[at]
        end = self.rng.randint(0, len(tokens))
        noted = min(noted, end // self.size)
        self.pool.unkeep(blocks_of_kept := [b for b in blocks if b in self.plain.kept])
        self.plain.unkeep(blocks_of_kept)
        given = self.pool.put(self.array(tokens[:end]), self.array(blocks), noted, salt).tolist()
        assert given == self.plain.put(tokens[:end], blocks, noted, salt)
        # As an engine would: take the block that was first, and drop one's own.
        whole = blocks[:noted] + given + blocks[noted + len(given) :]
        new = [block for block, own in zip(whole, blocks, strict=True) if block != own]
        old = [own for block, own in zip(whole, blocks, strict=True) if block != own]
        for block in new:
            self.pool.hold(block if self.rng.random() < 0.5 else self.array([block]))
        self.plain.take(0, new)
        self.pool.drop(old)
        self.plain.drop(old, 0)
        self.rows[at] = tokens, whole, noted + len(given), salt

    def go(self) -> None:
        if not self.rows:
            return
        several = self.rng.randint(1, 2)
        blocks = []
        for _ in range(min(several, len(self.rows))):
            blocks += self.rows.pop(self.rng.randrange(len(self.rows)))[1]
        self.step += 1
        after = self.step if self.fencing and self.rng.random() < 0.5 else None
        self.pool.drop(self.array(blocks), after)
        self.plain.drop(blocks, after or 0)

    def other(self) -> None:
        salt = self.rng.choice([None, b"", b"a", b"never"])
        if self.fencing and self.rng.random() < 0.8:
            step = self.rng.randint(self.plain.completed, self.step)
            self.pool.complete(step)
            self.plain.complete(step)
        elif self.rng.random() < 0.2:
            self.pool.forget(salt)
            self.plain.forget(salt)

    def keep(self) -> None:
        """Blocks that `put` never saw, as an engine with an index of its own has them."""
        listed = [block for _, blocks, _, _ in self.rows for block in blocks]
        unknown = [b for b in listed if not self.plain.key_of(b)]
        blocks = self.rng.sample(unknown, self.rng.randint(0, min(3, len(unknown))))
        self.pool.keep(self.array(blocks))
        self.plain.keep(blocks)
        if self.rng.random() < 0.3:
            kept = sorted(self.plain.kept)
            blocks = self.rng.sample(kept, self.rng.randint(0, min(3, len(kept))))
            self.pool.unkeep(self.array(blocks))
            self.plain.unkeep(blocks)

    def turn(self) -> None:
        acts = [self.come, self.come, self.note, self.note, self.go, self.other, self.keep]
        self.rng.choice(acts)()
        pool, plain = self.pool, self.plain
        pool.check()
        assert pool.available() == pool.num_free + pool.num_cached
        counts = pool.num_free, pool.num_cached, pool.num_fenced, pool.index_size[0]
        fenced = len(plain.fenced) + len(plain.waiting)
        known = len(plain.known) + len(plain.kept)
        assert counts == (plain.num_free, len(plain.cached), fenced, known)
        if self.rng.random() < 0.3:
            count = self.rng.randint(0, counts[0] + counts[1])
            assert pool.preview(count).tolist() == copy.deepcopy(plain).take(count, [])
        assert pool.taken().tolist() == plain.taken()
        assert sum(counts[:3]) + len(plain.refs) == pool.num_blocks


@pytest.mark.parametrize("first", [0, pytest.param(100, marks=pytest.mark.full)])
def test_it_does_what_a_plain_pool_does(first: int) -> None:
    evictions = hits = 0
    for seed in range(first, first + 100):
        world = World(seed)
        for _ in range(150):
            world.turn()
            hits += any(noted for _, _, noted, _ in world.rows)
        evictions += world.pool.index_size[1]
        while world.rows:
            world.go()
        if world.fencing:
            world.pool.complete(world.step)
        assert world.pool.taken().tolist() == []
        assert world.pool.num_free + world.pool.num_cached == world.pool.num_blocks
    assert evictions > 500
    assert hits > 2000


def test_a_hit_survives_while_it_is_held_and_goes_last_to_first() -> None:
    pool = BlockPool(6, 2)
    text = list(range(8))
    blocks = pool.take(4)
    pool.put(text, blocks)
    pool.drop(blocks)
    assert (pool.num_free, pool.num_cached) == (2, 4)
    pool.take(2, hold=blocks[:2])
    pool.take(1)  # the end of the text makes room
    assert pool.match(text).tolist() == blocks[:3].tolist()
    pool.take(1)
    assert pool.match(text).tolist() == blocks[:2].tolist()
    assert not pool.fits(1)


def test_ids_come_as_wide_as_they_are_asked_for() -> None:
    pool = BlockPool(4, 2, first_id=1)
    narrow, wide = pool.take(2), pool.take(2, int64=True)
    assert (narrow.dtype, wide.dtype) == (np.int32, np.int64)
    assert (narrow.tolist(), wide.tolist()) == ([1, 2], [3, 4])
    pool.drop(wide)


def test_blocks_of_a_step_that_runs_wait_for_its_end() -> None:
    pool = BlockPool(4, 2, fencing=True)
    blocks = pool.take(4)
    pool.put([1, 2], blocks)
    pool.drop(blocks, after=7)
    assert (pool.num_free, pool.num_cached, pool.num_fenced) == (0, 0, 4)
    assert pool.match([1, 2]).tolist() == [blocks[0]]  # read only: no need to wait
    with pytest.raises(OutOfPages, match="out of blocks: need 1, 0 are free, 0 cached, 4 fenced"):
        pool.take(1)
    pool.complete(6)
    assert pool.num_fenced == 4
    pool.complete(7)
    assert (pool.num_free, pool.num_cached, pool.num_fenced) == (3, 1, 0)


def test_kept_blocks_are_given_up_after_the_free_ones_oldest_first() -> None:
    pool = BlockPool(5, 2)
    blocks = pool.take(4)
    pool.keep(blocks[1:3])
    pool.drop(blocks[:2])  # block 1 is let go first
    pool.drop(blocks[2:])
    assert (pool.num_free, pool.num_cached, pool.index_size) == (3, 2, (2, 0))
    assert pool.preview(2).tolist() == [3, 0]
    assert pool.preview().tolist() == pool.preview(99).tolist() == [3, 0, 4, 1, 2]
    pool.take(0, hold=[1])  # used again, and last now
    pool.drop([1])
    assert pool.take(4).tolist() == [3, 0, 4, 2]
    assert pool.index_size == (1, 1)
    with pytest.raises(PageStateError, match="put behind of block 1: it is not known under this"):
        pool.put([1, 2, 3, 4, 5, 6], [1, 3, 4], 2)
    pool.unkeep([1])
    assert (pool.num_free, pool.num_cached) == (1, 0)
    pool.keep([3])
    before = pool.state_hash()
    pool.unkeep([3])
    assert pool.state_hash() != before
    pool.keep([3, 3])
    assert pool.state_hash() == before
    pool.forget(b"")
    assert pool.index_size[0] == 1
    pool.forget()
    assert pool.index_size[0] == 0
    pool.drop([3, 0, 4, 2])
    assert pool.num_free == 5


def test_without_caching_nothing_is_found() -> None:
    pool = BlockPool(4, 2, caching=False)
    blocks = pool.take(2)
    assert pool.put([1, 2, 3, 4], blocks, 1).tolist() == [blocks[1]]
    assert pool.match([1, 2, 3, 4]).tolist() == []
    pool.drop(blocks)
    assert pool.num_free == 4


def test_any_kind_of_array_will_do() -> None:
    torch = pytest.importorskip("torch")
    pool = BlockPool(4, 2)
    blocks = pool.take(2)
    pool.put(torch.tensor([1, 2, 3, 4]), torch.from_numpy(blocks))
    for tokens in ([1, 2, 3, 4], (1, 2, 3, 4), np.array([1, 2, 3, 4]), torch.tensor([1, 2, 3, 4])):
        assert pool.match(tokens).tolist() == blocks.tolist()
    strided = np.array([1, 9, 2, 9, 3, 9, 4, 9], np.int32)[::2]
    assert pool.match(strided).tolist() == blocks.tolist()


def test_a_later_put_does_not_read_the_tokens_before_it() -> None:
    pool = BlockPool(8, 2)
    blocks = pool.take(4)
    pool.put([1, 2, 3, 4], blocks)
    assert pool.put(["never", "read", 3, 4, 5, 6], blocks, 2).tolist() == [blocks[2]]
    assert pool.match([1, 2, 3, 4, 5, 6, 7]).tolist() == blocks[:3].tolist()


def test_a_recorded_run_replays(tmp_path: Path) -> None:
    path = tmp_path / "blocks.log"
    with BlockPool(8, 2, fencing=True, record=path) as pool:
        blocks = pool.take(3, tag="a")
        pool.put([1, 2, 3, 4], blocks)
        pool.keep([2])
        pool.drop(blocks, after=1)
        pool.complete(1)
        pool.unkeep([2])
    with pytest.raises(OrderError, match="the pool is closed"):
        pool.take(1)
    again, num_calls, end = BlockPool.replay(path)
    assert (num_calls, end) == (6, "closed")
    assert (again.digest, again.state_hash()) == (pool.digest, pool.state_hash())
    assert again.record_of(1)[2] == "a"
    with pytest.raises(RecordError, match=r"it is the log of a BlockPool: BlockPool\.replay reads"):
        Replay(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RecordError, match=r"event 6 at byte .*truncated"):
        BlockPool.replay(path)
    with pytest.raises(RecordError, match="cannot write the event log"):
        BlockPool(8, 2, record=tmp_path / "no" / "folder")
    with pytest.raises(ConfigError, match="record_limit must be 0 or more, got -1"):
        BlockPool(8, 2, record=path, record_limit=-1)


def test_ranks_can_compare_one_number() -> None:
    pools = [BlockPool(8, 2, digest=True) for _ in range(3)]
    for pool in pools:
        pool.take(2)
    assert pools[0].digest == pools[1].digest
    pools[2].drop([0])
    assert pools[2].digest != pools[0].digest
    assert BlockPool(8, 2).digest is None


Case = tuple[Callable[[BlockPool], object], type[Exception], str]


def refused() -> dict[str, Case]:
    """Calls on blocks 1 to 8, of 2 tokens: 1, 2 held by "a", 1 known; 3 fenced; 4 to 8 free."""
    none = "last tag none, last verb none"
    return {
        "twice": (
            lambda pool: pool.drop([2, 2]),
            PageStateError,
            "drop of block 2: it is named more often than the 1 times that it is held; "
            'it is owned, last tag "a", last verb take',
        ),
        "free": (
            lambda pool: pool.drop([1, 4]),
            PageStateError,
            f"drop of block 4: nobody holds it; it is free, {none}",
        ),
        "fenced": (lambda pool: pool.drop([3]), PageStateError, "drop of block 3: nobody holds it"),
        "foreign": (lambda pool: pool.drop([0]), ShapeError, "the pool's blocks are 1 to 8"),
        "behind": (lambda pool: pool.drop([9]), ShapeError, "block 9: the pool's blocks are 1 to"),
        "no int32": (lambda pool: pool.drop([1 << 40]), ShapeError, "which is no int32"),
        "floats": (lambda pool: pool.drop(np.ones(2)), ShapeError, "got 1 dimensions of"),
        "hold free": (
            lambda pool: pool.take(1, hold=[1, 5]),
            PageStateError,
            "take of block 5: nobody holds it and it is not cached",
        ),
        "too many": (lambda pool: pool.take(6), OutOfPages, "need 6, 5 are free, 0 cached, 1"),
        "negative": (lambda pool: pool.take(-1), ShapeError, "count must be 0 or more, got -1"),
        "huge": (lambda pool: pool.take(1 << 62), OutOfPages, "need 4611686018427387904, "),
        "few blocks": (lambda pool: pool.put([1] * 4, [1]), ShapeError, "fill 2 blocks, 1 are"),
        "start": (
            lambda pool: pool.put([1, 2], [1], 2),
            ShapeError,
            "from block 2 on: 1 are given",
        ),
        "number tag": (lambda pool: pool.take(1, tag=7), ShapeError, "a tag must be a str, got 7"),
        "tag of a drop": (lambda pool: pool.drop([2], tag=b"a"), ShapeError, "a str, got b'a'"),
        "bytes": (lambda pool: pool.drop(b"\x02"), ShapeError, "array or a list of ints, got b"),
        "put free": (
            lambda pool: pool.put([1, 2, 3, 4], [1, 4]),
            PageStateError,
            "put of block 4: nobody holds it",
        ),
        "put twice": (
            lambda pool: pool.put([1, 2, 3, 4, 5, 6], [1, 2, 2]),
            PageStateError,
            "put of block 2: it is named twice",
        ),
        "other tokens": (
            lambda pool: pool.put([9, 9], [1]),
            PageStateError,
            "put of block 1: it is known to hold other tokens",
        ),
        "other salt": (
            lambda pool: pool.put([1, 2, 3, 4, 5, 6], [1, 2, 2], 2, b"x"),
            PageStateError,
            "put behind of block 1: it is not known under this salt",
        ),
        "keep free": (lambda pool: pool.keep([2, 4]), PageStateError, "keep of block 4: nobody"),
        "keep known": (
            lambda pool: pool.keep([2, 1]),
            PageStateError,
            "keep of block 1: the pool's own index knows it",
        ),
        "unkeep known": (
            lambda pool: pool.unkeep([2, 1]),
            PageStateError,
            "unkeep of block 1: the pool's own index knows it",
        ),
        "keep foreign": (lambda pool: pool.keep([9]), ShapeError, "the pool's blocks are 1 to 8"),
        "preview": (lambda pool: pool.preview(-1), ShapeError, "count must be 0 or more, got -1"),
        "limit": (lambda pool: pool.match([1], limit=2), ShapeError, r"in \[0, 1\], got 2"),
        "salt": (
            lambda pool: pool.match([1], b"x" * 257),
            ShapeError,
            "at most 256 bytes, got 257",
        ),
        "str salt": (lambda pool: pool.forget("x"), ShapeError, "a salt must be bytes"),
        "back": (lambda pool: pool.complete(1), OrderError, "step 2 is complete already"),
        "no tokens": (
            lambda pool: pool.put(None, [1, 2, 2], 2),
            ShapeError,
            "tokens must be an array or a list of ints, got None",
        ),
        "no block": (lambda pool: pool.refs(9), ShapeError, "query of block 9: the pool's blocks"),
    }


@pytest.mark.parametrize("name", refused())
def test_a_refused_call_changes_nothing(name: str) -> None:
    call, kind, says = refused()[name]
    pool = BlockPool(8, 2, first_id=1, fencing=True)
    pool.take(2, tag="a")
    pool.put([1, 2], [1])
    pool.take(1)
    pool.complete(2)
    pool.drop([3], after=5)
    before = pool.state_hash(), pool.record_of(1), pool.record_of(2), pool.record_of(3)
    with pytest.raises(kind, match=says):
        call(pool)
    pool.check()
    assert before == (pool.state_hash(), pool.record_of(1), pool.record_of(2), pool.record_of(3))
    assert pool.record_of(1) == ("shared", 1, "a", 0, "put")
    assert pool.record_of(3) == ("fenced", 0, None, 5, "drop")
    assert pool.refs(2) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_blocks": 0}, r"num_blocks must be in \[1, 2147483646\], got 0"),
        ({"block_size": 0}, r"block_size must be in \[1, 1048576\], got 0"),
        ({"first_id": 2}, r"first_id must be in \[0, 1\], got 2"),
        ({"num_blocks": "many"}, "num_blocks must be a whole number of 64 bits, got 'many'"),
    ],
)
def test_a_bad_setting_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        BlockPool(**{"num_blocks": 4, "block_size": 2} | options)


def test_fences_need_the_option() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.take(1)
    with pytest.raises(ShapeError, match="drop after step 3: the pool was built without fencing"):
        pool.drop(blocks, after=3)
    with pytest.raises(ShapeError, match="complete of step 3: the pool was built without fencing"):
        pool.complete(3)
    assert pool.refs(int(blocks[0])) == 1


def test_an_error_names_who_dropped_the_block_before(tmp_path) -> None:
    """Also after a replay; a drop without a name, and a new take, end it."""
    path = tmp_path / "log"
    pool = BlockPool(4, 2, record=path)
    blocks = pool.take(2, tag="took")
    pool.drop(blocks[:1], tag="dropped")
    pool.drop(blocks[1:])
    with pytest.raises(PageStateError, match=r'last tag "took", last verb drop by "dropped"$'):
        pool.drop([0], tag="late")
    pool.close()
    pool, num_calls, _ = BlockPool.replay(path)
    assert num_calls == 3
    with pytest.raises(PageStateError, match=r'last tag "took", last verb drop by "dropped"$'):
        pool.drop([0], tag="late")
    with pytest.raises(PageStateError, match=r'last tag "took", last verb drop$'):
        pool.drop([1])
    assert 0 in pool.take(2, tag="new")
    with pytest.raises(PageStateError, match=r'last tag "new", last verb take$'):
        pool.drop([0, 0])


def test_the_environment_records_pools(tmp_path, monkeypatch) -> None:
    """Ledgers and pools of a process share the numbers of their files."""
    monkeypatch.setenv("SPECPOOL_RECORD", str(tmp_path / "log-%p"))
    pools = [BlockPool(4, 2), BlockPool(4, 2), BlockPool(4, 2, record=tmp_path / "own")]
    for size, pool in enumerate(pools):
        pool.take(size)
        pool.close()
    (own, *logs) = sorted(tmp_path.iterdir(), reverse=True)
    assert own.name == "own" and len(logs) == 2
    assert all(f"log-{os.getpid()}" in log.name for log in logs)
    lens = sorted(len(BlockPool.replay(log)[0].taken()) for log in logs)
    assert lens == [0, 1]
    assert BlockPool.replay(own)[0].taken().tolist() == [0, 1]


def test_objects_for_too_few_blocks_are_refused() -> None:
    pool = BlockPool(4, 1, first_id=1)
    before = pool.state_hash()
    with pytest.raises(ShapeError, match="of must have an object for each block up to 4, got 4"):
        pool.take(1, None, None, [None] * 4)
    assert pool.state_hash() == before
    assert pool.take(1, None, None, list("-abcd")) == ["a"]


def test_a_hold_is_recorded_as_the_take_that_it_is(tmp_path: Path) -> None:
    logs = []
    for name in ("hold", "take"):
        pool = BlockPool(4, 1, record=tmp_path / name)
        pool.take(2)
        pool.hold([0, 1, 1]) if name == "hold" else pool.take(0, [0, 1, 1])
        with pytest.raises(PageStateError, match="take of block 3: nobody holds it"):
            pool.hold([0, 3])
        pool.keep(1)
        pool.close()
        logs.append((tmp_path / name).read_bytes())
    assert logs[0] == logs[1]


def test_a_log_can_be_read_up_to_now(tmp_path: Path) -> None:
    pool = BlockPool(4, 1, record=tmp_path / "log")
    pool.take(2, tag="r")
    pool.sync()
    again, calls, end = BlockPool.replay(tmp_path / "log")
    assert (again.state_hash(), calls, end) == (pool.state_hash(), 1, "open")
    pool.drop([1])
    pool.close()
    pool.sync()
    assert BlockPool.replay(tmp_path / "log")[1:] == (2, "closed")
