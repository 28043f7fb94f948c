"""`SimDevice`: a simulated device driven by a seeded random generator.

Its slots record which text they hold, and it knows the true lengths. A forward reads its row's
prefix and writes every slot that a real round can touch. If the ledger fences pages, rows may run
in any order, but each row's steps run in order. Otherwise all steps run in order. Rows that share
pages must find their own text in them. A newly claimed page holds nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lab.sim.arrivals import Text
from lab.sim.broken_law import BrokenLaw
from lab.sim.settings import Settings
from lab.sim.states import SimStates
from specpool._core import Ledger, Plan
from specpool.engine.memory.host.handle import Moves
from specpool.engine.scheduler.step import Step, StepResult

Ints = npt.NDArray[np.int64]
Delta = Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]]


@dataclass(eq=False, slots=True)
class _Forward:
    """A launched step, of which some lanes may have run."""

    plan: Plan
    texts: list[Text]  # one for each lane
    has_ended: list[bool]  # for each lane: the step prefills the last of its prompt
    lines: list[Ints]  # for each group, the rows' pages at the launch, [B, pages_per_row]
    waiting: npt.NDArray[np.bool_]  # [B], lanes that have not run
    roots: Ints  # [B], where each lane's round began
    accept_len: Ints  # [B]
    has_failed: bool = False
    has_copied: bool = False  # its page copies have run


class SimHost:
    """Simulated host pages for `HostTier`, some of whose copies fail."""

    def __init__(self, device: SimDevice, settings: Settings, rng: random.Random) -> None:
        self._device, self._rng, self._faults = device, rng, settings.copy_faults
        self.num_pages = list(settings.host_pages)
        self.page_bytes = list(settings.page_sizes)
        self._memory = [
            np.zeros((n, size), np.int64)
            for n, size in zip(self.num_pages, self.page_bytes, strict=True)
        ]

    def save(self, moves: Moves) -> None:
        """See `Copies`."""
        self._check()
        for g, (device_pages, pages) in enumerate(moves):
            self._memory[g][pages] = self._device.pages(g)[device_pages]

    def load(self, moves: Moves) -> None:
        """See `Copies`."""
        self._check()
        for g, (device_pages, pages) in enumerate(moves):
            self._device.pages(g)[device_pages] = self._memory[g][pages]

    def seconds(self, num_pages: Sequence[int]) -> float:
        """See `Copies`."""
        return float(sum(num_pages))

    def _check(self) -> None:
        if self._faults and self._rng.random() < self._faults:
            raise RuntimeError("a simulated fault of a copy")


class SimDevice:
    """The simulated device: it runs launched steps.

    Args:
        ledger: the ledger of the steps.
        settings: the settings that the ledger was built with.
        rng: chooses the lanes of a step that run at its launch; the others run when they must.
        has_memory: whether slots are kept and checked; False means only lengths are.
    """

    def __init__(
        self, ledger: Ledger, settings: Settings, rng: random.Random, *, has_memory: bool = True
    ) -> None:
        self._shapes = ledger.shapes
        self._max_accept_lens = np.array([shape.max_accept_len for shape in self._shapes])
        self._rng, self._has_memory = rng, has_memory
        self._may_wait = settings.is_late and settings.page_fencing
        self._keeps_draft_kv = settings.keeps_draft_kv
        self._groups, self._windows = ledger.groups, settings.windows
        self._sinks = settings.sinks
        # Whether a group is for the draft model alone
        self._is_draft = [i == 1 and group.hosts_drafts for i, group in enumerate(self._groups)]
        num_rows = ledger.num_rows + 1
        self.tables = [ledger.full_table(g).astype(np.int64) for g in range(len(self._groups))]
        # For each group, what each slot holds, as in `Text.words`; negative = a step's drafts.
        self._states = SimStates(ledger) if ledger.states else None
        self._memory = [np.zeros((g.num_pages + 1) * g.page_size, np.int64) for g in self._groups]
        self._sizes = np.array(
            [(shape.num_steps, shape.topk, shape.num_draft_tokens) for shape in ledger.shapes]
        )
        self.roots = np.zeros(num_rows, np.int64)  # tokens with KV, by row
        self._epochs = np.full(num_rows, -1).astype(np.uint64)  # at each row's last forward
        self._is_broken = np.zeros(num_rows, bool)  # after a failed forward the row is garbage
        self._forwards: dict[int, _Forward] = {}  # launched and not taken over, by step

    def launch(
        self,
        step: Step,
        texts: list[Text],
        delta: Delta,
        load: Callable[[], None] | None = None,
    ) -> None:
        """Enqueue a step's forward after its table delta; `texts` are the texts of its lanes.

        For a reload, `load` copies from the host in place of a forward.
        """
        plan = step.plan
        for table, (rows, columns, pages) in zip(self.tables, delta, strict=True):
            table[rows, columns] = pages
        lines = [table[plan.rows] for table in self.tables] if self._has_memory else []
        self._forget_new_pages(plan, lines)
        batch = len(plan)
        zeros = np.zeros((2, batch), np.int64)
        ends = zip(step.requests, plan.new_len.tolist(), strict=True)
        has_ended = [load is None and end >= request.prefill_len for request, end in ends]
        forward = _Forward(plan, texts, has_ended, lines, np.ones(batch, bool), *zeros)
        for earlier in self._forwards.values():
            self._copy_pages(earlier)
            if earlier.waiting.any():  # a row's forwards run in order
                self._run(earlier, np.isin(earlier.plan.rows, plan.rows))
        self._forwards[plan.step] = forward
        if load is not None:
            self._run_reload(forward, load)
        elif not self._may_wait:
            self._run(forward, forward.waiting)
        elif self._rng.random() < 0.5:
            coins = self._rng.getrandbits(batch)
            self._run(forward, np.array([coins >> lane & 1 for lane in range(batch)], bool))

    def result(self, plan: Plan, *, not_finite: bool = False) -> StepResult:
        """Run a step and all steps before it; `not_finite` taints the first lane's logits."""
        forward = self._wait(plan.step)
        tokens: list[list[int]] = []
        if plan.kind == "decode":
            for text, root, n in zip(
                forward.texts, forward.roots.tolist(), forward.accept_len.tolist(), strict=True
            ):
                tokens.append(text.tokens[root + 1 : root + 1 + n])
        else:
            for text, end, has_ended in zip(
                forward.texts, plan.new_len.tolist(), forward.has_ended, strict=True
            ):
                tokens.append([text.tokens[end]] if has_ended else [])
        if not_finite and tokens[0]:
            tokens[0][-1] = -1
        return StepResult.of_lanes(tokens)

    def fail(self, step: int) -> None:
        """Fail the step's forward, also for lanes that have run."""
        forward = self._forwards[step]
        forward.has_failed = True
        self._is_broken[forward.plan.rows] = True
        for g, _, page, _ in forward.plan.page_copies.tolist():  # they may not have run
            rows, _ = (self.tables[g] == page).nonzero()
            self._is_broken[rows] = True
            self._page(g, page)[:] = 0
        forward.has_copied = True
        self._wait(step)

    def pages(self, g: int) -> Ints:
        """Return a view of a group's memory by pages."""
        return self._memory[g].reshape(-1, self._groups[g].page_size)

    def reset(self) -> None:
        """Forget all launched steps; the caller starts anew."""
        self._forwards.clear()

    def _wait(self, step: int) -> _Forward:
        for number in [n for n in self._forwards if n <= step]:
            forward = self._forwards[number]
            self._run(forward, forward.waiting)
            if number < step:
                raise BrokenLaw(f"step {step} is taken over before step {number}")
        return self._forwards.pop(step)

    def _page(self, g: int, page: int) -> Ints:
        """Return a view of a page's slots."""
        P = self._groups[g].page_size
        return self._memory[g][page * P : (page + 1) * P]

    def _forget_new_pages(self, plan: Plan, lines: list[Ints]) -> None:
        """Clear the pages that the step claimed, which hold an earlier owner's text."""
        before, after = plan.allocated_before, plan.allocated_after
        for g, lane in np.argwhere(after > before).tolist() if lines else ():
            P = self._groups[g].page_size
            pages = lines[g][lane, before[g, lane] // P : after[g, lane] // P]
            self._memory[g].reshape(-1, P)[pages] = 0

    def _copy_pages(self, forward: _Forward) -> None:
        """Do the step's page copies, before its forward and all later ones."""
        if forward.has_copied:
            return
        forward.has_copied = True
        if not self._has_memory:
            return
        for g, src, dst, num_tokens in forward.plan.page_copies.tolist():
            new = self._page(g, dst)
            new[:num_tokens] = self._page(g, src)[:num_tokens]
            new[num_tokens:] = 0

    def _run(self, forward: _Forward, lanes: npt.NDArray[np.bool_]) -> None:
        """Run those of these lanes that have not run yet."""
        self._copy_pages(forward)
        (chosen,) = np.nonzero(lanes & forward.waiting)
        if not len(chosen):
            return
        forward.waiting[chosen] = False
        plan = forward.plan
        rows = plan.rows[chosen]
        if plan.kind == "extend":
            self._run_extend(forward, chosen, rows)
        else:
            self._run_decode(forward, chosen, rows)

    def _run_reload(self, forward: _Forward, load: Callable[[], None]) -> None:
        self._copy_pages(forward)
        forward.waiting[:] = False
        rows = forward.plan.rows
        self._epochs[rows] = forward.plan.epochs
        self._is_broken[rows] = False
        self.roots[rows] = forward.plan.new_len
        load()

    def _run_extend(self, forward: _Forward, chosen: Ints, rows: npt.NDArray[np.int32]) -> None:
        plan = forward.plan
        starts, ends = plan.start[chosen].astype(np.int64), plan.new_len[chosen].astype(np.int64)
        # A row with a new request starts on the tokens that it shares. Its reads check them.
        is_new = self._epochs[rows] != plan.epochs[chosen]
        self._epochs[rows] = plan.epochs[chosen]
        if not forward.has_failed:
            self._is_broken[rows[is_new]] = False
        broken = self._is_broken[rows]
        self.roots[rows[is_new]] = starts[is_new]
        wrong = (self.roots[rows] != starts) & ~broken
        if wrong.any():
            raise BrokenLaw(
                f"step {plan.step} extends rows {rows[wrong]} from {starts[wrong]}, the device has "
                f"{self.roots[rows][wrong]} tokens of them"
            )
        self._touch(forward, chosen, starts, ends, [ends] * len(self._groups))
        self._fold(forward, chosen, starts, ends, ends - starts)
        self.roots[rows] = ends

    def _run_decode(self, forward: _Forward, chosen: Ints, rows: npt.NDArray[np.int32]) -> None:
        plan = forward.plan
        lo, hi = plan.lo[chosen].astype(np.int64), plan.hi[chosen].astype(np.int64)
        shapes = plan.shapes[chosen]
        roots, broken = self.roots[rows], self._is_broken[rows]
        if (((roots < lo) | (roots > hi)) & ~broken).any():
            raise BrokenLaw(
                f"step {plan.step}: the true roots {roots} of rows {rows} are not all in "
                f"{lo} .. {hi}"
            )
        roots = np.clip(roots, lo, hi)  # after a failed step a root may be out of range
        texts = forward.texts
        lanes = zip(chosen.tolist(), roots.tolist(), strict=True)
        correct = [texts[lane].correct_drafts[root] for lane, root in lanes]
        accept_len = np.minimum(np.array(correct) + 1, self._max_accept_lens[shapes])
        forward.roots[chosen], forward.accept_len[chosen] = roots, accept_len
        ends = [self._reach(g, shapes, roots) for g in range(len(self._groups))]
        self._touch(forward, chosen, roots, roots + accept_len, ends)
        _, _, nodes = self._sizes[shapes].T
        self._fold(forward, chosen, roots, roots + accept_len, nodes)
        self.roots[rows] = roots + accept_len

    def _fold(
        self, forward: _Forward, chosen: Ints, starts: Ints, keeps: Ints, widths: Ints
    ) -> None:
        """Run the lanes' states over `widths` tokens, of which those below `keeps` are right."""
        if self._states is None or not self._has_memory:
            return
        lanes = zip(*(array.tolist() for array in (chosen, starts, keeps, widths)), strict=True)
        for lane, start, keep, width in lanes:
            broken = bool(self._is_broken[forward.plan.rows[lane]])
            self._states.run(
                forward.plan,
                lane,
                forward.texts[lane],
                root=start,
                width=width,
                keep=keep - start,
                broken=broken,
            )

    def _touch(
        self, forward: _Forward, chosen: Ints, starts: Ints, keeps: Ints, ends: list[Ints]
    ) -> None:
        """Read [0, starts), write final text to [starts, keeps) and drafts to [keeps, ends).

        All are int64 [lanes]; `ends` has one array for each group.
        """
        if not self._has_memory:
            return
        plan = forward.plan
        rows = plan.rows[chosen]
        broken = self._is_broken[rows]
        for g, group in enumerate(self._groups):
            P, end, begin = group.page_size, ends[g], np.zeros_like(starts)
            window = self._windows[g]
            if window is not None:  # the first query reads no more, besides the sink
                begin = np.maximum(starts - window + 1, 0)
            sink = np.minimum(begin, self._sinks[g])
            ranges = zip(*(array.tolist() for array in (chosen, sink, begin, keeps)), strict=True)
            texts = ((forward.texts[lane].words, n, a, b) for lane, n, a, b in ranges)
            known = np.concatenate([w for words, n, a, b in texts for w in (words[:n], words[a:b])])
            beyond = end > plan.allocated_after[g][chosen]
            if beyond.any():
                raise BrokenLaw(
                    f"step {plan.step} writes up to {end[beyond]} in rows {rows[beyond]} of "
                    f"{group.name}, its plan reserved {plan.allocated_after[g][chosen][beyond]}"
                )
            size = sink + end - begin
            lane = np.repeat(np.arange(len(chosen)), size)
            position = np.arange(len(lane)) - (np.cumsum(size) - size)[lane]
            position += np.where(position < sink[lane], 0, (begin - sink)[lane])
            page = forward.lines[g][chosen[lane], position // P]
            slot = page * P + position % P
            stays = position < keeps[lane]
            words = np.full(len(lane), -plan.step)
            words[stays] = known
            is_old = position < starts[lane]
            missing = page == 0
            reads = is_old & ~broken[lane]
            if self._is_draft[g]:  # only drafting lanes read it
                drafts = plan.shapes[chosen] > 0
                reads &= drafts[lane] & self._keeps_draft_kv
            wrong = missing | (reads & (self._memory[g][slot] != words))
            if wrong.any():
                self._report(forward, g, int(np.flatnonzero(wrong)[0]), lane, position, slot, rows)
            words[broken[lane]] = -plan.step
            if self._is_draft[g] and not plan.writes_draft:
                words[:] = -plan.step
            self._memory[g][slot[~is_old]] = words[~is_old]

    def _report(
        self,
        forward: _Forward,
        g: int,
        index: int,
        lane: Ints,
        position: Ints,
        slot: Ints,
        rows: npt.NDArray[np.int32],
    ) -> None:
        word = int(self._memory[g][slot[index]])
        if slot[index] < self._groups[g].page_size:
            content = "has no page"
        elif word <= 0:
            content = (
                f"slot {slot[index]} holds drafts of step {-word}" if word else "is not written"
            )
        else:
            request_id, token_position = divmod(word, 1 << 20)
            content = f"slot {slot[index]} holds position {token_position} of request {request_id}"
        raise BrokenLaw(
            f"step {forward.plan.step} ({forward.plan.kind}), row {rows[lane[index]]} of "
            f"{self._groups[g].name}: position {position[index]} {content}"
        )

    def _reach(self, g: int, shapes: npt.NDArray[np.int32], roots: Ints) -> Ints:
        """Return the end of the slots that a round can write from these roots, [lanes]."""
        steps, topk, num_draft_tokens = self._sizes[shapes].T
        ends: Ints = roots + num_draft_tokens
        group = self._groups[g]
        if not group.hosts_drafts:
            return ends
        P = group.page_size
        drafts = roots + steps * topk
        if group.layout == "holey" and P > 1:
            offset = roots % P
            holey = roots - offset + topk * -(-(offset + steps) // P) * P
            drafts = np.where((topk > 1) & (steps > 0), holey, drafts)
        np.maximum(ends, drafts, out=ends)
        return ends
