"""docs/ledger.md says what the ledger does: its tables, its examples, its names."""

from __future__ import annotations

import re

import pytest

import ledger_table
import specpool
from ledger_kit import make, prefill, start
from paths import ROOT
from specpool import _core, kernels

TEXT = ledger_table.PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture(scope="module")
def parts() -> dict[str, str]:
    return ledger_table.parts()


@pytest.mark.parametrize("name", ["states", *ledger_table.TABLES])
def test_the_page_holds_what_walking_the_ledger_gives(parts, name):
    """`python tests/kits/ledger_table.py --write` after a change."""
    assert ledger_table.written(TEXT, {name: parts[name]}) == TEXT


def test_every_state_is_built_as_it_is_called():
    for build in ledger_table.STATES:
        world = ledger_table.World()
        build(world)
        assert ledger_table.name_of(world) == build.__name__


def test_retract_finish_and_abort_share_a_column():
    for verb in ("finish", "abort"):
        for build in ledger_table.STATES:
            gone = [
                ledger_table.outcome(build, lambda w, verb=verb: getattr(w.ledger, verb)(w.row))
                for verb in ("retract", verb)
            ]
            assert gone[0] == gone[1]


def test_every_verb_has_a_column():
    columns = " ".join(verb for table in ledger_table.TABLES.values() for verb in table)
    queries = {"check", "full_table", "is_live", "page_record", "page_table", "pages_needed"}
    queries |= {"ownership_map", "state_hash", "steps", "tag", "prefix_len", "checkpoint_len"}
    queries |= {"row_width", "pages_per_row", "free_pages", "fenced_pages", "reclaimable_pages"}
    queries |= {
        "allocated_len",
        "protected_len",
        "evicted_len",
        "audit",
        "pinned_pages",
        "check_quiet",
        "live_rows",
        "match_prefix",
        "cached_pages",
        "shared_pages",
        "held_cells",
        "held_pages",
        "pages_ahead",
        "tail_pages",
        "index_bytes",
        "index_entries",
        "lent_pages",
        "prefix_state_slot",
        "prefix_pages",
        "prefix_drafted_len",
        "state_slot",
        "state_len",
        "kept_state",
        "free_state_slots",
        "fenced_state_slots",
        "reclaimable_state_slots",
        "cached_state_slots",
        "soft_marks",
        "index_states",
        "known_prefix",
        "match_state",
        "state_ring_len",
        # What a connector is told is no part of the state.
        "watch_kv",
        "take_kv_events",
    }
    for name in dir(specpool.Ledger):
        if not name.startswith("_") and callable(getattr(specpool.Ledger, name)):
            assert (name in columns) != (name in queries), name


def test_the_names_for_an_engineer_of_sglang_exist():
    page = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    table = page.split("## Calls of SGLang's memory")[1].split("\n## ")[0]
    here = re.findall(r"`(\w+(?:\.\w+)?)`", " ".join(re.findall(r"\| [^|]+ \|$", table, re.M)))
    assert len(here) > 10
    for name in here:
        owner, _, attribute = name.rpartition(".")
        places = {
            "": (_core, specpool.Ledger),
            "Ledger": (specpool.Ledger,),
            "kernels": (kernels,),
            "_core": (_core,),
        }
        assert any(hasattr(place, attribute) for place in places[owner]), name


def test_the_window_of_the_picture():
    for length, kept in ((17, 17), (9, 0)):
        ledger = make(page_size=4, window=8)
        row = prefill(ledger, 18)
        start(ledger, row, shape=0)
        assert ledger.evicted_len(0)[row] == 8
        assert ledger.trim(row, length) == kept


def test_the_examples_run():
    names: dict = {}
    for block in BLOCKS:
        exec(block, names)
    assert len(BLOCKS) == 4

    chain = specpool.Shape.eagle(3, 1, 4)
    kv = specpool.Group("kv", page_size=4, num_pages=18, hosts_drafts=True)
    ledger = specpool.Ledger([kv], [chain], num_rows=4, max_context_len=60)
    rows = [ledger.admit() for _ in range(4)]
    plan = ledger.prepare_extend(rows, [16, 12, 24, 16])
    ledger.launch(plan.step)
    idle = [rows.pop(0)]
    ledger.end_turn(idle[0], 16)
    flying = [(plan.step, None)]
    ledger.complete(plan.step)
    step = ledger.prepare_decode(rows[2:], [1]).step
    ledger.launch(step)
    flying = [(step, [1])]
    ledger.trim(rows[2], 8)
    assert ledger.fenced_pages(0) == 3
    assert len(names["prepare"](ledger, rows[:2], flying, idle)) == 2
