"""`AllocatorPlayer`: calls SGLang's allocator of a window's slots as an embedder may, alone.

Rows grow by prefills and decodes, give up positions in front of their window, and end. A page that
is given up in part is gone as a whole, by the allocator's own word; who calls gives up only pages
that are complete.
"""

from __future__ import annotations

import dataclasses
import inspect

import torch
from sglang_device import Device

from lab.engines.case import Case
from lab.engines.device import SETUP, Finding, LateDevice
from lab.engines.laws import LAWS, EngineView
from lab.engines.sglang_pages import PageAccounts
from lab.engines.sglang_past_pools import make_allocator


@dataclasses.dataclass
class WindowedRow:
    """Slots of a row, how many positions have left the window, and the window's pages it has."""

    slots: torch.Tensor
    left: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)


class AllocatorPlayer:
    """Plays the verbs of a case on an allocator, and counts the pages of both of its pools."""

    def __init__(self, case: Case) -> None:
        self.case, self.page = case, case.settings["page"]
        size = case.settings["num_tokens"] // self.page * self.page
        self.allocator = make_allocator(case.settings, Device(size + self.page, self.page))
        self.device = LateDevice()
        self.pools = {
            "pages": PageAccounts(self.device, self.allocator.full_attn_allocator, self.page),
            "window": PageAccounts(self.device, self.allocator.swa_attn_allocator, self.page),
        }
        self.rows: dict[int, WindowedRow] = {}

    def run(self) -> list[Finding]:
        """Play the verbs, then end all rows; return what the first broken law says."""
        if hasattr(self.allocator, "free_swa_segment"):
            return [Finding(SETUP, "the allocator", "since 0.5.20 rows give back whole pages")]
        try:
            for verb in self.case.verbs:
                getattr(self, verb.name)(**verb.given)
                self._look("turn")
                if self.device.findings:
                    return self.device.findings
            for number in list(self.rows):
                self.end(number)
            self._look("rest")
        except AssertionError as error:  # the allocator's own sums
            self.device.fault("exception", "allocator", repr(error))
        return self.device.findings

    def grow(self, number: int, length: int) -> None:
        """A row gets so many slots more, if both pools have room."""
        row = self.rows.setdefault(number, WindowedRow(torch.empty(0, dtype=torch.int64)))
        before, after = len(row.slots), len(row.slots) + length
        need = (-(-after // self.page) - -(-before // self.page)) * self.page
        if need > min(pool.allocator.available_size() for pool in self.pools.values()):
            return
        given = {
            "need_size": length,
            "prefix_lens": torch.tensor([before]),
            "prefix_lens_cpu": torch.tensor([before]),
            "seq_lens": torch.tensor([after]),
            "seq_lens_cpu": torch.tensor([after]),
            "last_loc": row.slots[-1:] if before else torch.tensor([-1]),
            "extend_num_tokens": length,
        }
        call = self.allocator.alloc
        if self.page > 1:
            is_decode = length == 1 and before
            call = self.allocator.alloc_decode if is_decode else self.allocator.alloc_extend
        takes = inspect.signature(call).parameters
        new = call(**{name: value for name, value in given.items() if name in takes})
        row.slots = torch.cat([row.slots, new])
        for page in self.pools["window"].pages_of(self._mapped(new)):
            if page not in row.pages:
                row.pages.append(page)

    def leave(self, number: int, length: int) -> None:
        """So many positions more of a row leave its window, within pages that are complete."""
        row = self.rows.get(number)
        if row is None:
            return
        end = min(row.left + length, len(row.slots) // self.page * self.page)
        gone, row.left = row.slots[row.left : end], end
        pages = self.pools["window"].pages_of(self._mapped(gone))
        row.pages = [page for page in row.pages if page not in pages]
        self.allocator.free_swa(gone)

    def end(self, number: int) -> None:
        """A row ends."""
        row = self.rows.pop(number, None)
        if row is not None:
            self.allocator.free(row.slots)

    def _mapped(self, slots: torch.Tensor) -> torch.Tensor:
        mapped: torch.Tensor = self.allocator.full_to_swa_index_mapping[slots]
        return mapped[mapped > 0]

    def _look(self, when: str) -> None:
        for name, pool in self.pools.items():
            rows = {
                f"row {number}": [row.pages if name == "window" else pool.pages_of(row.slots)]
                for number, row in self.rows.items()
            }
            free, count = pool.free_pages(), pool.allocator.available_size() // self.page
            view = EngineView(pool.accounts, free, count, rows, {}, {})
            for law in LAWS:
                for text in (law.at_turn if when == "turn" else law.at_rest)(view):
                    self.device.fault(law.name, f"{name}, {when}", text)
