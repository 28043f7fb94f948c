"""A continuous-batching loop over the ledger: admission, prefill, decode with overlap, retraction.

The device is fake. Steps queue up on it, and when the loop waits for one, the device draws how many
tokens each lane accepts. While it works on a round, the next one is prepared and launched
(`overlap_depth=1`). rust/specpool-core/examples/scheduler.rs is the same in Rust and prints the
same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from specpool import Group, Ledger, OutOfPages, Shape

NUM_REQUESTS = 40
SHAPE = 1  # the tree's index in the ledger's list; 0 is "no drafting"


@dataclass
class Request:
    len: int  # tokens to prefill: the prompt and, after a retraction, what was generated
    end: int  # tokens at which it is done
    row: int = 0


class Scheduler:
    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of their admission
        # After a retraction no request is admitted until one is done.
        self.is_crowded = False
        # Launched and not waited for, oldest first: the step, and its lanes (0 for a prefill).
        self.on_device: deque[tuple[int, int]] = deque()
        self.seed = 1
        self.num_rounds = self.num_retractions = 0

    def draw(self, limit: int) -> int:
        """A number in 1..limit, from a linear congruential generator."""
        self.seed = (self.seed * 6_364_136_223_846_793_005 + 1) % 2**64
        return 1 + (self.seed >> 33) % limit

    def admit(self) -> None:
        """Admits while there are pages for a prompt and its first round; one prefill."""
        rows, lens, free = [], [], self.ledger.free_pages(0)
        while self.waiting:
            length = self.waiting[0].len
            free -= self.ledger.pages_needed(length, length, SHAPE)[0]
            if self.is_crowded or free < 0 or self.ledger.num_free_rows == 0:
                break
            request = self.waiting.popleft()
            request.row = self.ledger.admit()
            rows.append(request.row)
            lens.append(length)
            self.running.append(request)
        if rows:
            self.launch(self.ledger.prepare_extend(rows, lens).step, 0)

    def decode(self) -> None:
        """Runs a round of all. Out of pages: waits for steps in flight, then retracts."""
        while self.running:
            rows = np.array([request.row for request in self.running], np.int32)
            try:
                plan = self.ledger.prepare_decode(rows, np.full_like(rows, SHAPE))
            except OutOfPages:
                if self.on_device:
                    self.wait()
                elif len(rows) > 1:
                    self.retract_newest()
                else:
                    raise
            else:
                self.num_rounds += 1
                return self.launch(plan.step, len(rows))

    def launch(self, step: int, num_lanes: int) -> None:
        """An engine enqueues copies, delta and forward between `launch` and `ack_delta`."""
        self.ledger.launch(step)
        self.ledger.take_delta(step)
        self.on_device.append((step, num_lanes))
        self.ledger.ack_delta(step)

    def wait(self) -> None:
        """Waits for the oldest step. Finished requests leave, also with a round in flight."""
        step, num_lanes = self.on_device.popleft()
        if num_lanes:
            max_accept_len = self.ledger.shapes[SHAPE].max_accept_len
            self.ledger.resolve(step, [self.draw(max_accept_len) for _ in range(num_lanes)])
        self.ledger.complete(step)
        running, self.running = self.running, []
        for request in running:
            if self.ledger.resolved_len[request.row] < request.end:
                self.running.append(request)
            else:
                self.ledger.finish(request.row)
                self.is_crowded = False

    def retract_newest(self) -> None:
        """Retracts the last admitted request. It comes back later with the tokens that it has."""
        request = self.running.pop()
        request.len = int(self.ledger.resolved_len[request.row])
        self.ledger.retract(request.row)
        self.waiting.appendleft(request)
        self.is_crowded = True
        self.num_retractions += 1

    def serve(self) -> str:
        """Serves all requests, and returns the balance."""
        for _ in range(NUM_REQUESTS):
            length = self.draw(24)
            self.waiting.append(Request(length, length + 8 + self.draw(56)))
        while self.waiting or self.running:
            self.admit()
            self.decode()
            while len(self.on_device) > 1:
                self.wait()
        while self.on_device:
            self.wait()
        ledger = self.ledger
        ledger.check()
        return (
            f"{NUM_REQUESTS} requests done in {self.num_rounds} rounds, "
            f"{self.num_retractions} retractions\n"
            f"{ledger.free_pages(0)} of {ledger.groups[0].num_pages} pages free, "
            f"{ledger.fenced_pages(0)} fenced, "
            f"{ledger.num_free_rows} of {ledger.num_rows} rows free"
        )


def main() -> None:
    """Too few pages for eight rows."""
    group = Group("kv", page_size=4, num_pages=64, hosts_drafts=True)
    tree = Shape.eagle(3, 2, 6)
    ledger = Ledger([group], [tree], num_rows=8, max_context_len=128, overlap_depth=1)
    print(Scheduler(ledger).serve())


if __name__ == "__main__":
    main()
