"""`Worker`: what vLLM's model runner does with a scheduler's output, over a `LateDevice`.

Rows are mirrored as the runner does: the blocks of a new request, blocks appended to a running one,
and the blocks of a resumed one in place of its own. A launched step keeps its rows; what it reads,
accepts and says is found when it runs. The drafts that the target accepts follow from the seed, the
text and the position alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lab.engines.content import VOCABULARY, Keys, Text, digest
from lab.engines.device import LateDevice, LateWrite, LaunchedStep, SlotMemory
from lab.engines.known import FAILED_LOAD
from lab.engines.vllm_images import Images
from lab.engines.vllm_rows import Lane, WorkerRow
from lab.engines.vllm_states import States


def group_keys(keys: Keys, group: int) -> Keys:
    """Return the keys of one group's layers: groups share the memory of the blocks."""
    return keys ^ np.int64(group)


class Worker:
    """Runs scheduler outputs."""

    def __init__(
        self,
        device: LateDevice,
        settings: Mapping[str, Any],
        seed: int,
        num_blocks: int,
        text: Callable[[str], Text],
        hashes_next_token: bool,
    ) -> None:
        #: Whether a block's hash depends on the token behind it, as its draft KV does. In releases
        #: where it does not, a hit may mix blocks of several texts: the draft KV of a block's last
        #: position is then of another next token, which costs accepted drafts and no more.
        self.hashes_next_token = hashes_next_token
        self.device, self.settings, self.seed, self.text = device, settings, seed, text
        self.groups = settings["groups"]
        widest = max(group["block"] for group in self.groups)
        # Groups share the blocks' memory: a block holds what its last writer wrote.
        self.target = device.add(SlotMemory("target KV", num_blocks, widest))
        self.draft = device.add(SlotMemory("draft KV", num_blocks, widest))
        self.images = Images(device) if settings.get("images") else None
        self.states: States | None = None
        for at, group in enumerate(self.groups):
            if group["kind"] == "states":
                self.states = States(device, seed, at, group["block"], num_blocks)
        self.rows: dict[str, WorkerRow] = {}
        self.hits: dict[str, int] = {}  # tokens that each request had when it first ran
        connector = settings["connector"] or {}
        #: Loads may fail. What a step makes of a lost block is wrong, and is no fault of the engine
        #: until somebody is told a token of it.
        self.may_spoil = bool(connector.get("fails"))
        self.recomputes = self.may_spoil and connector["policy"] == "recompute"

    def launch(
        self, output: Any, loads: Sequence[LateWrite] = ()
    ) -> tuple[LaunchedStep, list[Lane]]:
        """Mirror the rows of a scheduler's output, and launch its step, which begins with loads."""
        for name in output.finished_req_ids:
            self.rows.pop(name, None)
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            known = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            starts[new.req_id] = new.num_computed_tokens
            self.hits[new.req_id] = new.num_computed_tokens
            self.rows[new.req_id] = WorkerRow(
                new.req_id,
                self.text(new.req_id),
                [list(part) for part in new.block_ids],
                new.num_computed_tokens,
                new.num_computed_tokens,
                len(known),
            )
        cached = output.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            row, blocks = self.rows[name], cached.new_block_ids[at]
            if _is_resumed(cached, at):
                known = row.text.num_prompt + cached.num_output_tokens[at]
                starts[name] = cached.num_computed_tokens[at]
                row = WorkerRow(
                    name, row.text, [list(part) for part in blocks], starts[name], starts[name],
                    known,
                )  # fmt: skip
                self.rows[name] = row
            elif blocks is not None:
                for mine, more in zip(row.blocks, blocks, strict=True):
                    mine.extend(more)
            row.declared = cached.num_computed_tokens[at]
            if self.recomputes and row.declared < row.computed:  # behind a failed load
                row.computed = row.declared
                row.known = row.text.num_prompt + cached.num_output_tokens[at]
        lanes = []
        for name, count in output.num_scheduled_tokens.items():
            row = self.rows[name]
            lanes.append(
                Lane(
                    row,
                    [list(part) for part in row.blocks],
                    count,
                    list(output.scheduled_spec_decode_tokens.get(name, ())),
                    starts.get(name),
                    row.declared,
                    row.seen,
                )
            )
        touched = {block for lane in lanes for part in lane.blocks for block in part if block}

        def work() -> None:
            for load in loads:
                self.device.land(load, load.blocks)
            if self.images is not None:
                self.images.encode(output, lanes)
            self._run(lanes)

        return self.device.launch(LaunchedStep(frozenset(touched), work)), lanes

    def has_results(self, lanes: list[Lane]) -> None:
        """Note that the scheduler has seen what a step said."""
        for lane in lanes:
            lane.row.seen += 1

    def _run(self, lanes: list[Lane]) -> None:
        begins = [lane.row.computed for lane in lanes]
        if self.states is not None:
            for lane, begin in zip(lanes, begins, strict=True):
                lane.state = lane.row.state
                self.states.move(lane, begin)
            for lane, begin in zip(lanes, begins, strict=True):
                self.states.read(lane, begin)
        if self.images is not None:
            for lane, begin in zip(lanes, begins, strict=True):
                self.images.read(lane, begin)
        ranges = [self._write(lane) for lane in lanes]
        if self.states is not None:
            for lane, (begin, right) in zip(lanes, ranges, strict=True):
                self.states.write(lane, begin, right)
                lane.row.state = lane.state
        if self.may_spoil:
            self._spoil(lanes, ranges)
        for lane, (begin, end) in zip(lanes, ranges, strict=True):
            if not lane.is_spoilt:
                self._read(lane, begin, end)
        for lane, (begin, end) in zip(lanes, ranges, strict=True):
            self._say(lane, begin, end)

    def _write(self, lane: Lane) -> tuple[int, int]:
        """Write a lane's KV; return the positions whose tokens are right."""
        row, begin = lane.row, lane.row.computed
        # The host may count drafts as accepted whose results it has not seen.
        unseen = sum(row.rejected[lane.seen :])
        if lane.start is None and lane.declared - unseen != begin:
            self.device.fault(
                "lengths",
                "declared",
                f"{row.name} has {begin} tokens computed, the scheduler declares {lane.declared} "
                f"of which {unseen} are rejected drafts",
            )
        drafted = len(lane.drafts)
        base = lane.count - drafted
        last = begin + base  # behind the known tokens
        if last > row.known:
            self.device.fault(
                "lengths",
                "scheduled",
                f"{row.name} is to compute {base} tokens behind {begin}, and {row.known} are known",
            )
        drafts = [
            mine if draft < 0 else draft
            for draft, mine in zip(lane.drafts, row.drafts + [-1] * drafted, strict=False)
        ]
        accepted = 0
        if last >= row.known:
            while accepted < drafted and drafts[accepted] == row.text.token(last + accepted):
                accepted += 1
        right, end = last + accepted, begin + lane.count
        for at, (group, blocks) in enumerate(zip(self.groups, lane.blocks, strict=True)):
            if group["kind"] == "states":
                continue
            size = group["block"]
            if end > len(blocks) * size or 0 in blocks[begin // size : -(-end // size)]:
                self.device.fault(
                    "lengths",
                    "row",
                    f"{row.name} writes positions {begin} to {end} of group {at}, its row is "
                    f"{blocks} with blocks of {size}",
                )
                continue
            garbage = [digest(self.seed, position, 3) for position in range(right, end)]
            keys = np.array(row.text.keys(begin, right).tolist() + garbage, np.int64)
            self.device.write(self.target, blocks, size, begin, group_keys(keys, at))
            if at == 0 and self.settings["drafter"] == "eagle":
                self.device.write(
                    self.draft, blocks, size, begin, row.text.draft_keys(begin, right)
                )
        return begin, right

    def _spoil(self, lanes: list[Lane], ranges: list[tuple[int, int]]) -> None:
        """Write wrong keys for lanes that read wrong ones, until no lane more does."""
        spread = True
        while spread:
            spread = False
            for lane, (begin, end) in zip(lanes, ranges, strict=True):
                blocks, size = lane.blocks[0], self.groups[0]["block"]
                if lane.is_spoilt or end > len(blocks) * size:
                    continue
                held = self.target.at(blocks, size)[:end]
                if (held != group_keys(lane.row.text.keys(0, end), 0)).any():
                    lane.is_spoilt = spread = True
                    wrong = [digest(self.seed, position, 29) for position in range(begin, end)]
                    keys = np.array(wrong, np.int64)
                    self.device.write(self.target, blocks, size, begin, keys)
                    written = blocks[begin // size : -(-end // size)]
                    self.device.notes |= dict.fromkeys(written, FAILED_LOAD)

    def _read(self, lane: Lane, begin: int, end: int) -> None:
        row = lane.row
        for at, (group, blocks) in enumerate(zip(self.groups, lane.blocks, strict=True)):
            if group["kind"] == "states":
                continue
            size, low = group["block"], 0
            if group["kind"] == "window":
                low = max(0, begin - group["window"] + 1)
            if end > len(blocks) * size:
                continue  # said when it was written
            keys = group_keys(row.text.keys(low, end), at)
            self.device.read(self.target, blocks, size, low, keys, row.name)
            if at == 0 and self.settings["drafter"] == "eagle":
                keys = row.text.draft_keys(0, end)
                if not self.hashes_next_token:
                    behind = np.arange(size - 1, begin, size)
                    held = self.draft.at(blocks, size)
                    keys[behind] = held[behind]
                self.device.read(self.draft, blocks, size, 0, keys, row.name)

    def _say(self, lane: Lane, begin: int, end: int) -> None:
        row = lane.row
        base = begin + lane.count - len(lane.drafts)
        if base < row.known:  # a chunk of prefill says nothing
            row.computed = begin + lane.count
            row.rejected.append(0)
            return
        accepted = end - base
        lane.said = [row.text.token(base + at) for at in range(accepted + 1)]
        if lane.is_spoilt:
            lane.said = [3 + (token + 1) % (VOCABULARY - 3) for token in lane.said]
        row.rejected.append(len(lane.drafts) - accepted)
        row.computed, row.known = end, end + 1
        row.drafts = self._propose(row)

    def _propose(self, row: WorkerRow) -> list[int]:
        """Drafts behind the known tokens: some right ones, then a wrong one."""
        count = self.settings["drafts"]
        if self.settings["drafter"] == "ngram":
            count = digest(self.seed, row.known, 5) % (count + 1)
        said = digest(self.seed, row.text.num_prompt, row.known, 7)
        percent = self.settings["accepted"]
        right = said % (count + 1) if percent == 50 else count * percent // 100
        tokens = [row.text.token(row.known + at) for at in range(count)]
        return [
            token if at < right else 3 + (token + 1) % (VOCABULARY - 3)
            for at, token in enumerate(tokens)
        ]


def _is_resumed(cached: Any, at: int) -> bool:
    resumed = getattr(cached, "resumed_req_ids", None)
    if resumed is not None:
        return cached.req_ids[at] in resumed
    return bool(cached.resumed_from_preemption[at])
