"""The guards of the regression scenarios, each with the edit that removes it from the core.

`make guards` applies one at a time to a copy, builds it and requires the scenario's tests to fail
(`run_guards.py`); `test_guards.py` checks that every edit still fits the source. A place is a file and a
function, as in `ledger/release.rs::clear_row`. The text must occur once in that function; how it is
broken into lines does not matter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

CORE = "rust/specpool-core/src"
# Its scenarios run through the scheduler and take their guards away themselves.
THROUGH_THE_SCHEDULER = "test_scenarios_scheduler.py"


def ledger_scenarios(tests: Path) -> list[Path]:
    """The files with the scenarios of the ledger alone."""
    paths = sorted(tests.glob("test_scenarios_*.py"))
    return [path for path in paths if path.name != THROUGH_THE_SCHEDULER]


@dataclass(frozen=True)
class Edit:
    """Replaces `old`, which occurs once in the function `place`, by `new`.

    Attributes:
        place: `file::function`, the file below `CORE`.
        old: Rust text; any run of white space stands for any other.
        new: what takes its place.
    """

    place: str
    old: str
    new: str

    @property
    def path(self) -> str:
        """The file below `CORE`."""
        return self.place.split("::")[0]

    def apply(self, root: Path) -> None:
        """Rewrites the file below `root`, or raises ValueError when `old` is not there once."""
        file = root / CORE / self.path
        text = file.read_text(encoding="utf-8")
        pattern = re.compile(r"\s+".join(map(re.escape, self.old.split())))
        found = [
            match
            for start, end in functions(text, self.place.split("::")[1])
            for match in pattern.finditer(text, start, end)
        ]
        if len(found) != 1:
            raise ValueError(f"{len(found)} times in {self.place}:\n{self.old}")
        start, end = found[0].span()
        # White space around `old` stays, so only that of `new` inside its text counts.
        file.write_text(text[:start] + self.new.strip() + text[end:], encoding="utf-8")


def functions(text: str, name: str) -> list[tuple[int, int]]:
    """Where functions of this name begin and end in a file that rustfmt has written."""
    found = []
    for match in re.finditer(rf"^( *)(?:pub(?:\([a-z]+\))? )?(?:const )?fn {name}\b", text, re.M):
        end = text.find(f"\n{match[1]}}}\n", match.end())
        found.append((match.start(), len(text) if end < 0 else end + len(match[1]) + 3))
    return found


@dataclass(frozen=True)
class Guard:
    """The guard of scenario `number`, and the edit that removes it."""

    number: int
    name: str
    edits: tuple[Edit, ...]


def guard(number: int, name: str, place: str, old: str, new: str, *more: Edit) -> Guard:
    return Guard(number, name, (Edit(place, old, new), *more))


GUARDS = [
    guard(
        1,
        "a release drops what is allocated",
        "ledger/release.rs::drop_row",
        "let cleared = self.groups[at].clear(row, fence, verb);",
        """let page_size = self.groups[at].page_size;
            let committed = crate::ids::ceil_align(self.rows.resolved[row.at()].into(), page_size);
            self.groups[at].allocated[row.at()] = committed as i32;
            let cleared = self.groups[at].clear(row, fence, verb);""",
    ),
    guard(
        2,
        "lanes whose epoch moved are skipped",
        "ledger/life.rs::resolve",
        "if stands(row, epoch) { len } else { 0 }",
        "if stands(row, epoch) { len } else { len }",
    ),
    guard(
        3,
        "a claim is rounded up to pages",
        "state/sizing.rs::grown",
        "            allocated + i64::from(missing > 0) * self.page_size\n",
        "            allocated + missing.max(0)\n",
    ),
    guard(
        4,
        "a row narrower than the claims is refused",
        "state/group.rs::new",
        "if row_width < least || row_width % page_size != 0 {",
        "if row_width % page_size != 0 {",
    ),
    guard(
        4,
        "a claim past the row is refused",
        "ledger/prepare.rs::prepare_decode",
        "is_wrong | (lo > before) | (i64::from(after) > group.row_width)",
        "is_wrong | (lo > before)",
    ),
    guard(
        5,
        "the row width derives from the reserve",
        "state/sizing.rs::row_width",
        "    Ok(ceil_align(widest, geometry.page_size))\n",
        """    let headroom = 4 + shapes.iter().map(|shape| i64::from(shape.num_draft_tokens)).max().unwrap_or(0);
    let widest = if geometry.page_size == 1 { max_context_len + headroom } else { widest };
    Ok(ceil_align(widest, geometry.page_size))\n""",
    ),
    guard(
        6,
        "a group is sized with its own page",
        "state/group.rs::geometry",
        "Geometry::new(self.page_size, self.hosts_drafts, self.layout)",
        "Geometry::new(self.page_size.min(64), self.hosts_drafts, self.layout)",
        Edit(
            "state/group.rs::new",
            "let row_width = row_width.unwrap_or(least);",
            "let row_width = row_width.unwrap_or(ceil_align(least, page_size));",
        ),
    ),
    guard(
        7,
        "a dropped column reads 0",
        "state/group.rs::drop_column",
        """fence.step, fence.completed, verb)?;
        self.set(row, column, Page::SINK);
        Ok(())""",
        """fence.step, fence.completed, verb)?;
        Ok(())""",
    ),
    guard(
        8,
        "a claim checks what is committed against what is allocated",
        "ledger/prepare.rs::prepare_decode",
        "is_wrong | (lo > before) | (i64::from(after) > group.row_width)",
        "is_wrong | (i64::from(after) > group.row_width)",
    ),
    guard(
        9,
        "the estimate is never negative",
        "state/sizing.rs::grown",
        "allocated + i64::from(missing > 0) * self.page_size",
        "allocated + missing",
    ),
    guard(
        10,
        "the round in flight counts with its own width",
        "state/rows.rs::push_rounds",
        "hi[at] += max_accept_len;",
        "hi[at] += 1 + 0 * max_accept_len;",
    ),
    guard(
        11,
        "a lagging draft is refused",
        "ledger/batch.rs::check_rounds",
        "let lags = |at: usize| (drafted[at] < resolved[at]) | (undrafted[at] > 0);",
        "let lags = |at: usize| (drafted[at] > resolved[at]) & (undrafted[at] > 0);",
    ),
    guard(
        20,
        "a cut makes the index forget what is written over",
        "ledger/cache.rs::shorten_index",
        "self.shorten(entry, column * page_size + len as usize % page_size, verb);",
        "let _ = (entry, column, page_size, verb);",
    ),
    guard(
        23,
        "a row waits for its fence",
        "ledger/release.rs::drop_row",
        "self.rows.give_back(row, Some(last).filter(|&step| step > fence.completed));",
        "self.rows.give_back(row, Some(last).filter(|_| false));",
    ),
    guard(
        24,
        "a page waits for its fence",
        "ledger/release.rs::fence",
        "let step = if self.page_fencing { self.rows.last_launched[row.at()] } else { 0 };",
        "let step = 0;",
    ),
    guard(
        25,
        "the reserve covers every root of the device",
        "state/group.rs::reserve",
        "reserve.extend_allocated(&allocated[lanes.clone()], &lo[lanes.clone()], &hi[lanes], after);",
        "let _ = hi;\n            reserve.extend_allocated(&allocated[lanes.clone()], &lo[lanes.clone()], &lo[lanes], after);",
    ),
    guard(
        26,
        "a cut moves the epoch",
        "ledger/release.rs::cut",
        "        self.rows.epoch[at] += 1;\n",
        "",
    ),
    guard(
        28,
        "the estimate is the claim's own",
        "ledger/prepare.rs::tokens_required",
        "slots += reserve.next_allocated(has, lo, hi[at].into()) - has;",
        "slots += reserve.next_allocated(has, lo, lo + 0 * i64::from(hi[at])) - has;",
    ),
    guard(
        30,
        "a cancel gives the pages back",
        "ledger/life.rs::cancel",
        """                    let shrunk = self.groups[at].shrink(Row(plan.rows[lane]), allocated(at, lane), fence, Verb::Cancel);
                    shrunk.map_err(|record| self.page_error(at, record))?;
""",
        "                    let _ = (fence, lane);\n",
    ),
    guard(
        31,
        "a claim counts pages",
        "state/sizing.rs::grown",
        "            allocated + ceil_align(missing, self.page_size)\n",
        "            allocated + self.page_size\n",
    ),
    guard(
        33,
        "evictions go by r, not by hi",
        "ledger/prepare.rs::evict_to",
        "group.evict_to(self.rows.settled(row))",
        "group.evict_to(self.rows.hi[row.at()])",
    ),
    guard(
        33,
        "a cut to the checkpoint cuts e",
        "state/group.rs::cut",
        "            self.evicted[at] = first.min(evict_to) as i32;\n",
        "            let _ = first.min(evict_to);\n",
    ),
    guard(
        39,
        "no more tokens are indexed than are resolved",
        "ledger/cache.rs::check_index",
        "if tokens.is_empty() || tokens.len() > resolved as usize {",
        "if tokens.is_empty() {",
    ),
    guard(
        39,
        "no tokens are indexed that a step in flight writes",
        "ledger/cache.rs::check_index",
        "(from as usize) < tokens.len()",
        "from < 0",
    ),
    guard(
        40,
        "an evicted page leaves the table and e rises",
        "state/group.rs::evict",
        "        self.evicted[row.at()] = self.evicted[row.at()].max(to as i32);\n",
        "",
        Edit(
            "state/group.rs::drop_column",
            """fence.step, fence.completed, verb)?;
        self.set(row, column, Page::SINK);
        Ok(())""",
            """fence.step, fence.completed, verb)?;
        Ok(())""",
        ),
    ),
    guard(
        41,
        "a fence holds the page that was dropped",
        "state/page_pool.rs::settle",
        "            (true, false) => self.fenced.push(page),\n",
        "            (true, false) => self.fenced.push(Page(self.map.len() as i32 - 1)),\n",
    ),
    guard(
        42,
        "a page that another entry holds is not indexed",
        "ledger/cache.rs::can_hold",
        "holder => holder == entry && self.index.pages(entry, at).get(column) == Some(&page.0),",
        "_ => entry < u32::MAX,",
    ),
    guard(
        48,
        "a release is in the digest",
        "ledger/release.rs::give_back",
        "        self.note(call, &Given::Nothing(()), None);\n",
        "",
    ),
    guard(
        51,
        "fenced pages are counted apart",
        "ledger/share.rs::out_of_pages",
        "(pool.num_cached(), pool.num_fenced(), pool.num_reclaimable())",
        "(pool.num_cached(), 0, pool.num_reclaimable())",
    ),
    guard(
        52,
        "launch compares epochs",
        "ledger/life.rs::launch",
        "            if now != planned {\n",
        "            if now < planned {\n",
    ),
    guard(
        53,
        "hi sums each round's own A",
        "ledger/prepare.rs::plan",
        "        Ok(Plan {\n            step: self.steps.next(),",
        """        for (lane, hi) in hi.iter_mut().enumerate() {
            let most = self.shapes[shapes[lane] as usize].max_accept_len() as i32;
            *hi = start[lane] + (lo[lane] - start[lane]) * most;
        }
        Ok(Plan {
            step: self.steps.next(),""",
    ),
    guard(
        54,
        "a cut ends the rounds",
        "state/rows.rs::forget_rounds",
        "    pub(crate) fn forget_rounds(&mut self, row: Row) {\n        let at = row.at();\n        self.in_flight[at] = 0;\n",
        "    pub(crate) fn forget_rounds(&mut self, row: Row) {\n        let at = row.at();\n",
    ),
    guard(
        54,
        "a cut counts launched roots",
        "state/rows.rs::written",
        "self.settled(row) + self.launched_rounds[row.at()]",
        "self.settled(row)",
    ),
    guard(
        54,
        "a cut counts no root that is only prepared",
        "state/rows.rs::written",
        "self.settled(row) + self.launched_rounds[row.at()]",
        "self.settled(row) + self.in_flight[row.at()]",
    ),
    guard(
        54,
        "a cut counts no extend that is only prepared",
        "state/rows.rs::settled",
        "            from => from - 1,\n",
        "            _ => self.resolved[row.at()],\n",
    ),
    guard(
        54,
        "a cut needs a new root",
        "state/rows.rs::forget_rounds",
        "        self.extend_from[at] = 0;\n        self.ready[at] = false;\n",
        "        self.extend_from[at] = 0;\n",
    ),
    guard(
        54,
        "a cut that takes a round needs a new root",
        "ledger/release.rs::cut",
        "cut == self.rows.resolved[at] && self.rows.in_flight[at] == 0;",
        "cut == self.rows.resolved[at];",
    ),
    guard(
        54,
        "a cut that takes nothing needs none",
        "ledger/release.rs::cut",
        "        self.rows.ready[at] |= keeps_root;\n",
        "        let _ = keeps_root;\n",
    ),
    guard(
        55,
        "a cut needs its window",
        "state/group.rs::next_cut",
        "        if self.evict_to(len) >= i64::from(self.evicted[row.at()]) {\n",
        "        if len >= 0 {\n",
    ),
    guard(
        56,
        "no fork over a round in flight",
        "ledger/quiet.rs::check_still",
        "if self.rows.in_flight[at] > 0 || self.rows.has_unlaunched_extend(row) {",
        "if self.rows.has_unlaunched_extend(row) {",
        Edit(
            "ledger/quiet.rs::check_still",
            "        if last > completed {\n",
            "        if last > completed + 9 {\n",
        ),
    ),
    guard(
        56,
        "a cut below p goes to a page edge",
        "state/group.rs::next_cut",
        "        if len < self.protected[row.at()] && len % page_size != 0",
        "        if len < 0",
    ),
    guard(
        57,
        "one entry a cell",
        "state/delta.rs::mark",
        "            number => self.entries[number as usize - 1] = entry,\n",
        "            _ => self.entries.push(entry),\n",
    ),
    guard(
        58,
        "A is bounded by the nodes",
        "shape.rs::max_accept_len",
        "        (self.num_steps + 1).min(self.num_draft_tokens)\n",
        "        self.num_steps + 1\n",
    ),
    guard(
        59,
        "extends fence too",
        "state/rows.rs::launch",
        "            last[row as usize] = plan.step;\n",
        """            if plan.kind == StepKind::Decode {
                last[row as usize] = plan.step;
            }
""",
    ),
    guard(
        60,
        "complete is in the digest",
        "ledger/life.rs::complete",
        "        self.note(&Call::Complete { step }, &Given::Nothing(()), None);\n",
        "",
    ),
    guard(
        61,
        "an abandoned step's rows are retracted",
        "ledger/life.rs::abandon",
        "rows.iter().try_for_each(|&row| self.drop_row(Row(row), Verb::Abandon))",
        "rows.iter().try_for_each(|_| Ok(()))",
    ),
    guard(
        61,
        "an abandoned step is resolved",
        "state/step.rs::set_abandoned",
        "            self.queue[index].abandoned = true;\n        }\n        self.set_resolved(step);\n",
        "            self.queue[index].abandoned = true;\n        }\n",
    ),
    guard(
        62,
        "every group is checked before any is touched",
        "ledger/prepare.rs::check_pages",
        "            if need > free + cached {\n                let free",
        "            if at == 0 && need > free + cached {\n                let free",
    ),
    guard(
        62,
        "a tail's page is checked before the row is taken",
        "ledger/share.rs::new_row",
        "            if start.tail.is_some() && pool.num_free()",
        "            if at == 0 && start.tail.is_some() && pool.num_free()",
    ),
    guard(
        63,
        "launch takes the oldest step",
        "state/step.rs::check_launch",
        """        match self.unlaunched().next() {
            Some(record) if record.plan.step == step => Ok(record),
            Some(record) => {
                Err(Error::Order(format!("launch""",
        """        match self.unlaunched().next() {
            Some(_) if self.unlaunched().any(|record| record.plan.step == step) => self
                .get(step)
                .ok_or_else(|| Error::Order(format!("launch of step {step}"))),
            Some(record) => {
                Err(Error::Order(format!("launch""",
    ),
    guard(
        64,
        "only a launch fences",
        "ledger/prepare.rs::claim",
        "        self.drop_orphan_copies(verb);\n        let copies = std::mem::take(&mut self.copies);\n",
        """        for &row in &plan.rows {
            self.rows.last_launched[row as usize] = plan.step;
        }
        self.drop_orphan_copies(verb);
        let copies = std::mem::take(&mut self.copies);\n""",
    ),
    guard(
        65,
        "a stale step is in the way",
        "state/step.rs::mark_stale",
        "            record.stale = record.stale || record.plan.rows.contains(&row);\n",
        "            let _ = (record, row);\n",
    ),
    guard(
        65,
        "a stale step can be cancelled",
        "state/step.rs::check_cancel",
        """            Some(record) if record.plan.step == step => Ok(record),
            Some(record) => {
                Err(Error::Order(format!("cancel""",
        """            Some(record) if record.plan.step == step && !record.stale => Ok(record),
            Some(record) => {
                Err(Error::Order(format!("cancel""",
    ),
    guard(
        66,
        "no extend over a round in flight",
        "ledger/prepare.rs::prepare_extend_keeping",
        "            if rounds > 0 {\n",
        "            if rounds > 99 {\n",
    ),
    guard(
        67,
        "one unlaunched extend a row",
        "ledger/prepare.rs::prepare_extend_keeping",
        "            if self.rows.has_unlaunched_extend(row) {\n",
        "            if self.rows.has_unlaunched_extend(row) && rounds > 99 {\n",
    ),
    guard(
        67,
        "evictions go by r before an extend that is not launched",
        "ledger/prepare.rs::evict_to",
        "group.evict_to(self.rows.settled(row))",
        "group.evict_to(self.rows.resolved[row.at()])",
    ),
    guard(
        68,
        "an acknowledgement spares later changes",
        "state/delta.rs::acknowledge",
        "            let keep = entry.version > version;\n",
        "            let keep = entry.version > version && entry.version == 0;\n",
    ),
    guard(
        69,
        "abandon takes rows that were cut",
        "ledger/life.rs::abandon",
        "        rows.extend(&record.plan.rows);\n",
        """        let plan = &record.plan;
        let stands = |lane: &usize| self.rows.epoch[plan.rows[*lane] as usize] == plan.epochs[*lane];
        rows.extend((0..plan.num_lanes()).filter(stands).map(|lane| plan.rows[lane]));\n""",
    ),
    guard(
        70,
        "a fork waits for the last launched step",
        "ledger/quiet.rs::check_still",
        "        if last > completed {\n",
        "        if last > completed && self.rows.in_flight[at] > 0 {\n",
    ),
    guard(
        71,
        "every holder leaves its fence on the page",
        "state/page_pool.rs::drop_holder",
        "            line.fence = line.fence.max(fence);\n            line.last_verb = verb;\n",
        "            line.fence = fence;\n            line.last_verb = verb;\n",
    ),
    guard(
        72,
        "copies ride on the next step, whatever its rows",
        "ledger/prepare.rs::claim",
        "        let copies = std::mem::take(&mut self.copies);\n",
        """        let (copies, waiting): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.copies).into_iter().partition(|copy| plan.rows.contains(&copy.row.0));
        self.copies = waiting;\n""",
    ),
    guard(
        73,
        "a copy holds its pages, or is dropped",
        "state/page_pool.rs::hold",
        "        self.map[page.at()].copies += 1;\n",
        "        let _ = page;\n",
        Edit("state/page_pool.rs::unhold", "        line.copies -= 1;\n", ""),
        Edit(
            "ledger/quiet.rs::drop_orphan_copies",
            "            if !stays {\n",
            "            let stays = true;\n            if !stays {\n",
        ),
    ),
    guard(
        73,
        "a launched copy leaves its fence on both pages",
        "ledger/life.rs::launch_copies",
        "let fence = if self.page_fencing { step } else { 0 };",
        "let fence = 0 * step;",
    ),
    guard(
        74,
        "abandon takes the rows of the copies",
        "ledger/life.rs::abandon",
        "        rows.extend(record.before.copies.iter().map(|copy| copy.row.0));\n",
        "",
    ),
    guard(
        74,
        "no fork of a row whose tail is not there yet",
        "ledger/share.rs::fork",
        "        self.check_no_copy_into(parent, Verb::Fork.name())?;\n",
        "",
    ),
    guard(
        75,
        "lo is the first position behind what is committed",
        "ledger/prepare.rs::plan",
        "*lo = resolved[at] + in_flight[at];",
        "*lo = in_flight[at];",
    ),
    guard(
        76,
        "a cut inside a page needs the page",
        "state/group.rs::window_columns",
        "        self.columns(self.evict_to(len), ceil_align(len.into(), self.page_size))\n",
        "        self.columns(self.evict_to(len), (i64::from(len) / self.page_size * self.page_size).max(self.evict_to(len)))\n",
    ),
    guard(
        76,
        "a pin needs its window",
        "ledger/share.rs::pin_prefix",
        "            if group.lacks_window(evicted, length) {\n",
        "            if group.lacks_window(0, length) {\n",
    ),
    guard(
        76,
        "an admit needs its window",
        "ledger/share.rs::admit_on",
        "            if group.lacks_window(held, len) {\n",
        "            if group.lacks_window(0, len) {\n",
    ),
    guard(
        76,
        "a new row has no root",
        "state/rows.rs::admit",
        "        self.live[row.at()] = true;\n",
        "        self.live[row.at()] = true;\n        self.ready[row.at()] = true;\n",
    ),
    guard(
        77,
        "a cancel puts no fence on its pages",
        "ledger/life.rs::cancel",
        "let fence = Fence { step: 0, completed: self.steps.completed() };",
        "let fence = Fence { step: self.steps.completed() + 1, completed: self.steps.completed() };",
    ),
    guard(
        77,
        "an extend counts from what is allocated",
        "ledger/prepare.rs::prepare_extend_keeping",
        "let allocated = i64::from(group.allocated[row as usize]);\n                let after = ceil_align",
        """let allocated = ceil_align(self.rows.resolved[row as usize].into(), group.page_size);
                let after = ceil_align""",
    ),
    guard(
        49,
        "a cut is noted for the connector",
        "ledger/release.rs::cut",
        "self.feed.iter_mut().for_each(|feed| feed.cut(row, cut));",
        "",
    ),
    guard(
        49,
        "what a step may still write is not told",
        "ledger/kv_events.rs::settled",
        "settled[row as usize] = settled[row as usize].min(from);",
        "let _ = from;",
    ),
    guard(
        49,
        "what a copy may still write is not told",
        "ledger/kv_events.rs::settled",
        "settled[copy.row.at()] = settled[copy.row.at()].min(from as i32);",
        "let _ = from;",
    ),
    guard(
        49,
        "what has left a window is told",
        "ledger/kv_events.rs::events",
        "                if start < end {\n                    events.push(KvEvent::Evict {",
        "                if start > end {\n                    events.push(KvEvent::Evict {",
    ),
    guard(
        78,
        "a lent page is named once",
        "state/lent_pages.rs::name",
        "Some(_) if self.is_named(page) => Unnamed::Twice,",
        "",
    ),
    guard(
        78,
        "only a lent page is given up",
        "state/lent_pages.rs::name",
        "Some(record) if !self.is_lent(page) => Unnamed::NotLent(record),",
        "",
    ),
    guard(
        78,
        "a row on lent pages holds them",
        "ledger/lend.rs::admit_lent",
        'let shared = collected(held.iter().map(|&page| Page(page)), "the pages of a row")?;',
        'let shared = collected([].iter().map(|&page| Page(page)), "the pages of a row")?;',
    ),
    guard(
        78,
        "what a step still writes is not lent",
        "ledger/lend.rs::check_lendable",
        "filter(|&(_, from)| from < end)",
        "filter(|&(_, from)| from < start)",
    ),
    guard(
        78,
        "a rebind gives back behind the fence",
        "ledger/lend.rs::rebind",
        "group.pool.release(own_page, row, fence.step, fence.completed, Verb::Rebind)?;",
        "group.pool.release(own_page, row, 0, fence.completed, Verb::Rebind)?;",
    ),
    guard(
        79,
        "an export holds its pages",
        "ledger/transfer.rs::export",
        "self.share(group, &prefix.held, Verb::Export)?;",
        "let _ = (group, &prefix.held);",
    ),
    guard(
        79,
        "a row that leaves is still",
        "ledger/transfer.rs::export",
        "self.check_still(row, Verb::Export.name())?;",
        "",
    ),
    guard(
        79,
        "an import has pages for all of its tokens",
        "ledger/transfer.rs::import_row",
        "let end = ceil_align(len.into(), group.page_size);",
        "let end = i64::from(len) / group.page_size * group.page_size;",
    ),
    guard(
        79,
        "an export has the tokens of its state",
        "ledger/transfer.rs::export",
        "let len = self.len_to_share(row, Verb::Export)?;",
        "let len = resolved;",
    ),
    guard(
        79,
        "an export holds its state slot",
        "ledger/transfer.rs::export",
        "self.with_states(|states| states.pool.share(slot, Verb::Export))?;",
        "",
    ),
    guard(
        79,
        "an export needs a state",
        "ledger/transfer.rs::export",
        "if len == 0 {",
        "if resolved == 0 {",
    ),
    guard(
        79,
        "a row on an export has all tokens of its state",
        "ledger/share.rs::admit_on",
        "if slot != Page::SINK && len != 0 && len != max_len {",
        "if len > max_len {",
    ),
    guard(
        79,
        "an import needs a slot",
        "ledger/transfer.rs::import_row",
        "self.check_free_slot()?;",
        "",
    ),
    guard(
        79,
        "a state that arrives is of no step",
        "ledger/fold.rs::import_state",
        "states.kept.set_written(slot, Writer::default());",
        "",
    ),
    guard(
        80,
        "a fold leaves what is in flight",
        "state/state_group.rs::round_end",
        "{ len } else { resolved }",
        "{ len } else { resolved + in_flight }",
    ),
    guard(
        80,
        "an eager round has nothing in flight before it",
        "state/state_group.rs::round_end",
        "self.spec.eager && in_flight == 0 && nodes == 1",
        "self.spec.eager && nodes == 1",
    ),
    guard(
        80,
        "a fold goes forward",
        "state/state_group.rs::round_end",
        "i64::from(resolved - len) < self.spec.flush",
        "i64::from(resolved - len).abs() < self.spec.flush",
    ),
    guard(
        80,
        "only the holder of a slot writes it",
        "state/state_group.rs::target",
        "self.pool.holders_if_unfenced(slot, completed) != Some(1)",
        "self.pool.holders_if_unfenced(slot, completed).is_none()",
    ),
    guard(
        80,
        "a slot is not written under a reader",
        "state/state_group.rs::target",
        "self.pool.holders_if_unfenced(slot, completed) != Some(1)",
        "completed == u64::MAX || !self.waits_for_fence(row)",
    ),
    guard(
        80,
        "a row that goes leaves no state",
        "state/state_group.rs::clear",
        "(self.slot[row.at()], self.len[row.at()]) = (0, 0);",
        "",
    ),
    guard(
        80,
        "a cut to c keeps the slot",
        "state/state_group.rs::next_cut",
        "if len >= state_len",
        "if len > state_len",
    ),
    guard(
        80,
        "a cut below c needs a state",
        "state/state_group.rs::next_cut",
        "self.held_below(row, len).1",
        "self.held_below(row, len).1.max(len)",
    ),
    guard(
        80,
        "a ring counts the tokens that wait for a flush",
        "state/state_group.rs::ring_len",
        "i64::from(nodes) + self.flush - 1",
        "i64::from(nodes)",
    ),
    guard(
        80,
        "a cut below a checkpoint drops its slot",
        "state/state_group.rs::cut",
        "mark > len) { self.drop_mark",
        "mark < 0) { self.drop_mark",
    ),
    guard(
        80,
        "a slot waits for the steps of its row",
        "state/state_group.rs::clear",
        "self.pool.release(self.slot_of(row), row, fence.step, fence.completed, verb)?;",
        "self.pool.release(self.slot_of(row), row, 0, fence.completed, verb)?;",
    ),
    guard(
        80,
        "a slot waits for the step that reads it",
        "state/state_group.rs::launch",
        "self.pool.release(slot, Row(writer.row), fence.step, fence.completed, Verb::Launch)",
        "self.pool.release(slot, Row(writer.row), 0, fence.completed, Verb::Launch)",
    ),
    guard(
        80,
        "a cancel gives c back",
        "state/state_group.rs::undo",
        "self.len[row.at()] = fold.from;",
        "",
    ),
    guard(
        80,
        "a cut undoes unlaunched folds",
        "ledger/release.rs::cut",
        "self.undo_folds(row, verb)?;",
        "",
    ),
    guard(
        80,
        "an abandoned step's states go",
        "ledger/release.rs::drop_row",
        "self.with_states(|states| states.clear(row, fence, verb))?;",
        "",
    ),
    guard(
        81,
        "a published state is not written in place",
        "state/state_group.rs::target",
        "Target::FreshOrStolen(slot)",
        "Target::Same(slot)",
    ),
    guard(
        81,
        "a row alone gets its slot back",
        "state/state_group.rs::target",
        "Target::FreshOrStolen(slot)",
        "Target::Fresh",
    ),
    guard(
        82,
        "an extend leaves its last token",
        "ledger/fold.rs::plan_folds",
        "plan.new_len[lane] - 1,",
        "plan.new_len[lane],",
    ),
    guard(
        82,
        "a lane's state is its row's",
        "ledger/fold.rs::plan_folds",
        "let at = row.at();",
        "let at = lane + 1;",
    ),
    guard(
        83,
        "a kept prompt leaves its state",
        "ledger/fold.rs::claim_folds",
        "marked[lane as usize] = states.leave_soft_mark(Row(plan.rows[lane as usize]), verb);",
        "",
    ),
    guard(
        83,
        "a hit looks for states in every part of its text",
        "ledger/cache.rs::longest_state",
        "states.kept.of_entry(child, start + agree as i32);",
        "states.kept.of_entry(child, start);",
    ),
    guard(
        84,
        "a hit ends where a state is",
        "ledger/cache.rs::go_back_to_a_state",
        "(hit.slot, hit.len) = self.longest_state(hit, root, tokens).unwrap_or((Page::SINK, 0));",
        "hit.slot = self.longest_state(hit, root, tokens).map_or(Page::SINK, |state| state.0);",
    ),
    guard(
        84,
        "a state serves once its writer is complete",
        "ledger/cache.rs::longest_state",
        "states.kept.writer(state.slot).step <= completed",
        "states.kept.writer(state.slot).step < u64::MAX - completed",
    ),
    guard(
        84,
        "a failed step's states leave the index",
        "ledger/fold.rs::drop_spoiled_states",
        "states.drop_spoiled(is_spoiled, steps.completed(), Verb::Abandon);",
        "",
    ),
    guard(
        85,
        "a hit holds its state",
        "state/state_group.rs::start",
        "self.pool.share(slot, verb)?;",
        "",
    ),
    guard(
        87,
        "only the oldest round in flight starts at r",
        "ledger/share.rs::writes_from",
        "stands && self.rows.oldest_round(row) == plan.step",
        "stands && record.plan.kind == crate::state::step::StepKind::Decode && !record.resolved",
    ),
]
