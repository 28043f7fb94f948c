"""Texts on the host: which blocks are kept, which come back, and that they have their bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from host_kit import TREE, World, groups
from specpool import Ledger, ShapeError, StateGroup
from specpool.engine.memory.host.copies import HostMemory
from specpool.engine.memory.host.handle import Handle
from specpool.engine.memory.host.tier import HostTier
from specpool.engine.memory.kv_cache import KVCache, LayerKV

SALTS = [b"", b"tenant"]


class Texts:
    """A world whose rows hold KV that depends on their salt and tokens alone."""

    def __init__(self, *page_sizes: int, host_rows: float = 3, policy: str = "always") -> None:
        of = groups(*page_sizes, num_slots=192)
        self.world = World(of, host_rows=host_rows, num_rows=4, max_chunk=16, draft_kv=True)
        self.world.tier = HostTier(self.world.ledger, self.world.memory, policy=policy)
        self.ledger, self.tier = self.world.ledger, self.world.tier
        self.block_len = self.tier.texts.block_len

    def compute(self, tokens: Sequence[int], salt: bytes = b"", *, draft: bool = True) -> int:
        """Prefill a row."""
        row = self.ledger.admit()
        self._give(row, tokens, salt)
        self._prefill(row, len(tokens), draft=draft)
        return row

    def save(self, row: int, tokens: Sequence[int], salt: bytes = b"") -> int:
        return self.tier.texts.save(row, np.array(tokens, np.int32), salt, 1.0)

    def keep(self, tokens: Sequence[int], salt: bytes = b"", *, draft: bool = True) -> int:
        """Prefill a row, save its text, give the row back; how many tokens were copied."""
        row = self.compute(tokens, salt, draft=draft)
        num_tokens = self.save(row, tokens, salt)
        self.world.give_back(row)
        return num_tokens

    def lend(
        self, tokens: Sequence[int], start: int = 0, salt: bytes = b"", *, needs_draft: bool = False
    ) -> Handle | None:
        array = np.array(tokens, np.int32)
        return self.tier.lend(array, salt, start, 1.0, needs_draft=needs_draft)

    def bring_back(
        self, tokens: Sequence[int], start: int = 0, salt: bytes = b"", *, needs_draft: bool = False
    ) -> int:
        """Prefill `start` tokens, reload what the host has of the rest; the row's length then."""
        handle = self.lend(tokens, start, salt, needs_draft=needs_draft)
        row = self.compute(tokens[:start], salt)
        self._give(row, tokens, salt)
        self.world.write = self._write  # type: ignore[method-assign]
        if handle is not None:
            at = start
            while at < handle.length:
                at, draft = self.tier.next_extend(handle, at)
                plan = self.ledger.prepare_extend([row], [at], writes_draft=draft)
                self.world.launch(plan)
                self.tier.restore(plan, [handle])
                self.ledger.complete(plan.step)
            assert not self.tier.holds(handle)
            assert int(self.ledger.resolved_len[row]) == handle.length
        assert not self.world.wrong(row)
        length = int(self.ledger.resolved_len[row])
        self.world.give_back(row)
        return length

    def check(self) -> None:
        self.ledger.check()
        self.tier.check()

    def _prefill(self, row: int, length: int, *, draft: bool) -> None:
        start = 0
        while start < length:
            end = min(length, start + 16)
            plan = self.ledger.prepare_extend([row], [end], writes_draft=draft)
            self.world.launch(plan)
            self._write(row, start, end)
            self.ledger.complete(plan.step)
            start = end

    def _give(self, row: int, tokens: Sequence[int], salt: bytes) -> None:
        words = [hash((salt, *tokens[: i + 1])) % 251 for i in range(len(tokens))]
        size = self.world.context + 64
        self.world.kv[row] = []
        for buffer in self.world.buffers:
            kv = torch.zeros(size, *buffer.shape[1:], dtype=torch.int16)
            for at, word in enumerate(words):
                kv[at] = word
            self.world.kv[row].append(kv.view(torch.bfloat16))

    def _write(self, row: int, start: int, end: int) -> None:
        pairs = zip(self.world.buffers, self.world.buffer_groups, strict=True)
        for at, (buffer, group) in enumerate(pairs):
            slots = self.world.slots(row, group, np.arange(start, end))
            buffer[slots] = self.world.kv[row][at][start:end]


@pytest.mark.sample(2)
@pytest.mark.parametrize("page_sizes", [(1,), (4,), (4, 4), (2, 3), (16, 4)])
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3))]
)
def test_what_is_kept_and_comes_back(page_sizes: tuple[int, ...], seed: int) -> None:
    """Law: the blocks used last are kept, a text comes back as far as its blocks are here without
    a hole, and every byte is the one that was computed."""
    rng = random.Random(seed)
    texts = Texts(*page_sizes, host_rows=1.5)
    size = texts.block_len
    room = min(
        group.num_pages // n
        for group, n in zip(
            texts.tier.stats().groups, texts.tier.texts.pages_per_block, strict=True
        )
    )
    kept: list[tuple[bytes, tuple[int, ...]]] = []  # blocks by all tokens up to their end

    def blocks(tokens: Sequence[int], salt: bytes) -> list[tuple[bytes, tuple[int, ...]]]:
        ends = range(size, len(tokens) + 1, size)
        return [(salt, tuple(tokens[:end])) for end in ends]

    known = [[rng.randrange(3) for _ in range(48)]]
    found = evicted = 0
    for _ in range(100):
        tokens = rng.choice(known)[: rng.randint(16, 48)]
        tokens = tokens + [rng.randrange(3) for _ in range(rng.randint(1, 48))]
        tokens, salt = tokens[:48], rng.choice(SALTS)
        known = [*known[-6:], tokens]
        of = blocks(tokens, salt)
        if rng.random() < 0.5:
            here = [key for key in of if key in kept]
            kept = [key for key in kept if key not in here] + here[::-1]
            new = [key for key in of if key not in here]
            new = new[: room - len(here)]
            spare = max(len(kept) + len(new) - room, 0)
            gone = [key for key in kept if key not in here][:spare]
            kept = [key for key in kept if key not in gone] + new
            evicted += len(gone)
            assert texts.keep(tokens, salt) == len(new) * size
        elif rng.random() < 0.95:
            start = rng.randint(0, len(tokens) - 1)
            run = start // size
            while run < len(of) and of[run] in kept:
                run += 1
            expected = max(start, min(run * size, len(tokens) - 1))
            assert texts.bring_back(tokens, start, salt) == expected
            found += expected > start
        else:
            texts.tier.texts.forget(salt)
            kept = [key for key in kept if key[0] != salt]
        texts.check()
        assert len(texts.tier.texts) == len(kept)
    assert texts.tier.texts.eviction_ct == evicted > 0
    assert found > 3
    texts.tier.close()
    texts.world.is_clean()


def test_what_a_reload_copies_stays_until_it_is_over() -> None:
    texts = Texts(4, host_rows=1)
    tokens = list(range(40))
    assert texts.keep(tokens) == 40
    handle = texts.lend(tokens)
    assert handle is not None and handle.length == 39
    texts.tier.texts.forget()
    assert len(texts.tier.texts) == 0 and texts.tier.stats().groups[0].free_pages < 10
    other = list(range(100, 148))
    assert texts.keep(other) == 8, "ten of twelve pages are in use"
    texts.check()
    texts.tier.drop(handle)
    texts.check()
    assert texts.keep(other) == 40


def test_texts_give_way_to_rows() -> None:
    texts = Texts(4, host_rows=1)
    assert texts.keep(list(range(40))) == 40
    row = texts.world.admit(40)
    handle = texts.world.offload(row)
    assert handle is not None
    assert texts.tier.stats().text_eviction_ct == 8, "two pages were free"
    texts.world.check()
    assert texts.keep(list(range(100, 148))) == 8, "the row does not give way to a text"


def test_draft_kv_comes_with_the_text() -> None:
    texts = Texts(4, 4)
    tokens = list(range(24))
    assert texts.keep(tokens, draft=False) == 24
    assert texts.lend(tokens, needs_draft=True) is None
    handle = texts.lend(tokens)
    assert handle is not None and (handle.length, handle.drafted_len) == (23, 0)
    assert texts.keep(tokens) == 0, "what a reload uses is not replaced"
    texts.tier.drop(handle)
    assert texts.keep(tokens) == 24, "KV without draft KV gives way"
    handle = texts.lend(tokens, needs_draft=True)
    assert handle is not None and (handle.length, handle.drafted_len) == (23, 23)
    texts.tier.drop(handle)
    texts.check()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_copy_that_fails_keeps_nothing(monkeypatch, error: type[BaseException]) -> None:
    texts = Texts(4)
    tokens = list(range(24))
    row = texts.compute(tokens)

    def save(moves: object) -> None:
        raise error("planted")

    with monkeypatch.context() as patch:
        patch.setattr(texts.world.memory, "save", save)
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                texts.save(row, tokens)
        else:
            assert texts.save(row, tokens) == 0
    assert texts.tier.stats().failed_ct == 1
    texts.check()
    assert texts.save(row, tokens) == 24


def test_a_text_whose_copy_back_fails_is_forgotten(monkeypatch) -> None:
    texts = Texts(4)
    tokens = list(range(24))
    texts.keep(tokens)

    def load(moves: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(texts.world.memory, "load", load)
    with pytest.raises(RuntimeError, match="planted"):
        texts.bring_back(tokens)
    assert len(texts.tier.texts) == 0, "nobody tries it again and again"
    texts.tier.check()


def test_after_ctrl_c_no_text_is_in_use() -> None:
    texts = Texts(4, host_rows=1)
    texts.keep(list(range(40)))
    assert texts.lend(list(range(40))) is not None
    texts.tier.texts.forget()
    assert texts.tier.recover([]) == []
    texts.check()
    assert texts.keep(list(range(100, 148))) == 48


def test_only_what_pays_is_copied() -> None:
    for policy, saved in (("never", 0), ("cost", 24), ("always", 24)):
        texts = Texts(4, policy=policy)
        assert texts.keep(list(range(24))) == saved
    row = texts.compute(list(range(24)))
    texts.tier._policy = "cost"
    assert texts.tier.texts.save(row, np.arange(100, 124, dtype=np.int32), b"", 0.0) == 0
    assert texts.tier.lend(np.arange(24, dtype=np.int32), b"", 0, 0.0, needs_draft=False) is None


def test_a_model_with_windows_keeps_no_texts() -> None:
    world = World(groups(4, windows=[(4, 8)]))
    row = world.admit(24)
    assert not world.tier.texts.is_on
    assert world.tier.texts.save(row, np.arange(24, dtype=np.int32), b"", 1.0) == 0


def test_a_lent_handle_is_not_cut() -> None:
    texts = Texts(4)
    texts.keep(list(range(24)))
    handle = texts.lend(list(range(24)))
    assert handle is not None
    with pytest.raises(ShapeError, match=r"\[0, 23\] and no lent handle, got 5"):
        texts.tier.trim(handle, 5)
    assert texts.tier.holds(handle)


def test_keys_depend_on_every_token_and_on_the_salt() -> None:
    """Law: two texts share a block only if everything up to its end is equal."""
    texts = World(groups(2)).tier.texts
    rng, seen = random.Random(1), dict[bytes, tuple[bytes, tuple[int, ...]]]()
    for _ in range(500):
        tokens, salt = [rng.randrange(2) for _ in range(rng.randint(2, 12))], rng.choice(SALTS)
        for at, key in enumerate(texts.keys(np.array(tokens, np.int32), salt)):
            text = salt, tuple(tokens[: 2 * at + 2])
            assert seen.setdefault(key, text) == text
    assert len(set(seen.values())) == len(seen) > 100


class StatefulTexts:
    """A ledger with a state group; what it holds of a text is a function of salt and tokens."""

    def __init__(self, page_sizes: Sequence[int], host_rows: int) -> None:
        specs = groups(*page_sizes, num_slots=96)
        states = [StateGroup("ssm", num_slots=5)]
        self.ledger = Ledger(specs, [TREE], num_rows=3, max_context_len=48, states=states)
        layers = [LayerKV(1, 2, 2)] * len(specs)
        self.cache = KVCache(
            self.ledger,
            layers,
            [*range(len(specs))],
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self.slots = [torch.zeros(6, 2, 2)]
        host_bytes = host_rows * (48 * 4 * 4 * len(specs) + 16)
        memory = HostMemory(self.ledger, self.cache, host_bytes, self.slots)
        self.tier = HostTier(self.ledger, memory, policy="always")
        self.sizes = page_sizes

    def word(self, tokens: Sequence[int], salt: bytes) -> float:
        return float(hash((salt, *tokens)) % 9973)

    def kv(self, row: int, group: int, position: int) -> list[torch.Tensor]:
        size = self.sizes[group]
        slot = int(self.ledger.page_table(group)[row][position // size]) * size + position % size
        return [self.cache.keys[group][slot], self.cache.values[group][slot]]

    def compute(self, tokens: list[int], salt: bytes, rng: random.Random) -> set[int]:
        """Go on from a hit, keep states at random places, save the text; return its states."""
        row = self.ledger.admit_cached(np.array(tokens, np.int32), salt)
        while (start := int(self.ledger.resolved_len[row])) < len(tokens):
            end, draft = min(len(tokens), start + rng.choice([1, 2, 9, 20])), rng.random() < 0.9
            plan = self.ledger.prepare_extend([row], [end], keep=[0], writes_draft=draft)
            self.ledger.launch(plan.step)
            self.cache.copy_pages(plan.page_copies)
            for position in range(start, end):
                for group in range(len(self.sizes)):
                    for cell in self.kv(row, group, position):
                        cell[:] = self.word(tokens[: position + 1], salt)
            if slot := int(plan.state_dst[0, 0]):
                self.slots[0][slot] = self.word(tokens[: int(plan.state_to[0, 0])], salt)
            self.ledger.complete(plan.step)
            self.ledger.index(row, tokens[:end], salt)
        limit, lengths = len(tokens), set()
        while (found := self.ledger.match_state(tokens, salt, limit=limit))[0]:
            lengths.add(found[1])
            limit = found[1] - 1
        self.tier.texts.save(row, np.array(tokens, np.int32), salt, 1.0)
        self.ledger.finish(row)
        return lengths

    def bring_back(self, handle: Handle, tokens: list[int], salt: bytes) -> None:
        """Reload it and compare every byte."""
        row = self.ledger.import_row(handle.length, handle.drafted_len)
        assert self.tier.fill(handle, row)
        for position in range(handle.length):
            word = self.word(tokens[: position + 1], salt)
            for group in range(len(self.sizes)):
                assert all((cell == word).all() for cell in self.kv(row, group, position))
        state = self.slots[0][int(self.ledger.state_slot(0)[row])]
        assert (state == self.word(tokens[: handle.length], salt)).all()
        self.ledger.abort(row)


@pytest.mark.parametrize("host_rows", [2, 200])
@pytest.mark.parametrize("page_sizes", [(4,), (2, 3), (1,)])
def test_texts_have_their_states(page_sizes: tuple[int, ...], host_rows: int) -> None:
    """Law: the longest state on the host that begins like a text comes back with its KV."""
    rng, texts = random.Random(host_rows), StatefulTexts(page_sizes, host_rows)
    saved: set[tuple[bytes, tuple[int, ...]]] = set()
    known = [[rng.randrange(3) for _ in range(40)]]
    back = none = evicted = 0
    for _ in range(120):
        start = rng.choice(known)
        tokens = start[: rng.randint(0, 30)] + [rng.randrange(3) for _ in range(rng.randint(2, 12))]
        tokens, salt = tokens[:44], rng.choice(SALTS)
        if rng.random() < 0.3:
            tokens = start[: rng.randint(2, len(start))] if len(start) > 1 else tokens
        if rng.random() < 0.5:
            known = [*known[-6:], tokens]
            saved |= {(salt, tuple(tokens[:n])) for n in texts.compute(tokens, salt, rng)}
        else:
            needs_draft = rng.random() < 0.3
            array = np.array(tokens, np.int32)
            handle = texts.tier.lend(array, salt, 0, 1.0, needs_draft=needs_draft)
            serving = [n for n in range(1, len(tokens)) if (salt, tuple(tokens[:n])) in saved]
            if handle is None:
                none += 1
                assert host_rows == 2 or needs_draft or not serving
            else:
                back += 1
                assert handle.length in serving
                assert host_rows == 2 or needs_draft or handle.length == max(serving)
                assert not needs_draft or handle.drafted_len == handle.length
                texts.bring_back(handle, tokens, salt)
        texts.tier.check()
        texts.ledger.check()
    evicted = texts.tier.stats().text_eviction_ct
    assert back > 5 and none > 2 and (evicted > 10) == (host_rows == 2), (back, none, evicted)
    texts.tier.close()
    assert all(group.free_pages == group.num_pages for group in texts.tier.stats().groups)
