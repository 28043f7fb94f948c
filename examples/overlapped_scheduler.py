"""A continuous-batching loop with overlap, chunked prefill, a prefix cache, retraction and aborts.

docs/testing.md tests it with `LedgerMachine`. Here a fake device serves requests that begin alike.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from specpool import Group, Ledger, OutOfPages, Plan, Shape
from specpool.testing import FakeDevice

Prepare = Callable[[list[int], list[int]], Plan]  # rows, and the shape or new length of each


@dataclass(eq=False)
class Request:
    number: int
    tokens: list[int]  # the prompt, and what was generated
    end: int  # the length at which it is done
    row: int = 0


class Scheduler:
    def __init__(self, ledger: Ledger, device: FakeDevice) -> None:
        self.ledger, self.device = ledger, device
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of their admission
        # Launched, results not in yet, oldest first: the turn, the plan, the request of each lane.
        self.flying: deque[tuple[int, Plan, list[Request]]] = deque()
        self.turn = self.num_reused = self.num_retractions = 0

    def submit(self, number: int, prompt: list[int], max_new_tokens: int) -> None:
        self.waiting.append(Request(number, list(prompt), len(prompt) + max_new_tokens))

    def abort(self, number: int) -> None:
        self.waiting = deque(request for request in self.waiting if request.number != number)
        for request in [request for request in self.running if request.number == number]:
            self.running.remove(request)
            self.ledger.abort(request.row)  # also in flight: the late result is dropped

    def step(self) -> bool:
        self.turn += 1
        self.decode()  # before anyone is admitted to the pages that a retraction made free
        self.prefill()
        self.admit()
        while self.flying and self.flying[0][0] <= self.turn - self.ledger.overlap_depth:
            self.take_results()
        return bool(self.waiting or self.running or self.flying)

    def decode(self) -> None:
        shape = len(self.ledger.shapes) - 1
        while batch := [request for request in self.running if self.num_missing(request) == 0]:
            batch = batch[: self.ledger.max_batch]
            if self.launch(self.ledger.prepare_decode, batch, [shape] * len(batch)):
                return
            self.make_room()

    def prefill(self) -> None:
        while batch := [request for request in self.running if self.num_missing(request)]:
            batch = batch[: self.ledger.max_batch]
            ends = [self.chunk_end(request) for request in batch]
            if self.launch(self.ledger.prepare_extend, batch, ends):
                return
            self.make_room()

    def admit(self) -> None:
        while self.waiting and self.ledger.num_free_rows and self.start(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        if self.waiting and not (self.running or self.flying):
            self.ledger.forget()  # alone, it has no room beside the page that it copies from

    def start(self, request: Request) -> bool:
        tokens = request.tokens
        try:
            request.row = self.ledger.admit_cached(tokens, tag=f"request {request.number}")
        except OutOfPages:
            return False
        hit = len(tokens) - self.num_missing(request)
        self.device.begin(request.row, tokens[:hit], prompt=tokens)
        if self.launch(self.ledger.prepare_extend, [request], [self.chunk_end(request)]):
            self.num_reused += hit
            return True
        self.ledger.abort(request.row)
        return False

    def num_missing(self, request: Request) -> int:
        return len(request.tokens) - int(self.ledger.resolved_len[request.row])

    def chunk_end(self, request: Request) -> int:
        missing = self.num_missing(request)
        return len(request.tokens) - missing + min(missing, self.ledger.max_chunk or missing)

    def launch(self, prepare: Prepare, batch: list[Request], values: list[int]) -> bool:
        try:
            plan = prepare([request.row for request in batch], values)
        except OutOfPages:
            return False  # and nothing has changed
        self.ledger.launch(plan.step)
        self.device.launch(plan)  # the table's delta, the page copies, the forward
        self.flying.append((self.turn, plan, batch))
        return True

    def take_results(self) -> None:
        _, plan, batch = self.flying.popleft()
        if plan.kind == "decode":
            self.ledger.resolve(plan.step, self.device.accept_lens(plan.step))
        self.device.finish(plan.step)
        self.ledger.complete(plan.step)
        for request in batch if plan.kind == "decode" else []:
            if request in self.running:  # else it has ended since the launch
                length = int(self.ledger.resolved_len[request.row])
                request.tokens += self.device.tokens(request.row)[len(request.tokens) : length]
                if length >= request.end:
                    self.release(request, self.ledger.finish)

    def make_room(self) -> None:
        if self.flying:  # requests may end, and fenced pages come back
            return self.take_results()
        request = self.running[-1]  # the last admitted, in the batch or not
        self.release(request, self.ledger.retract)
        self.waiting.appendleft(request)
        self.num_retractions += 1

    def final_len(self, request: Request) -> int:
        """Return how many tokens no round in flight writes again.

        The oldest round starts at `resolved_len`. If it fails, the next ones may start at their
        `lo`, which is less if results came in since they were prepared: at depths above 1.
        """
        flying = [(plan, batch) for _, plan, batch in self.flying if request in batch]
        starts = [int(plan.lo[batch.index(request)]) for plan, batch in flying]
        return min([int(self.ledger.resolved_len[request.row]), *starts[1:]])

    def release(self, request: Request, verb: Callable[[int], None]) -> None:
        self.ledger.index(request.row, request.tokens[: self.final_len(request)])
        self.running.remove(request)
        verb(request.row)


def main() -> None:
    """Serve requests in a pool with too few pages for four rows."""
    kv, chain = Group("kv", page_size=4, num_pages=24, hosts_drafts=True), Shape.eagle(3, 1, 4)
    ledger = Ledger([kv], [chain], num_rows=4, max_context_len=64, overlap_depth=1, max_chunk=8)
    scheduler = Scheduler(ledger, FakeDevice(ledger))
    system = list(range(10))
    for number in range(12):
        scheduler.submit(number, [*system, number], 20 + number)
    while scheduler.step():
        ledger.check()
    free = ledger.free_pages(0) + ledger.cached_pages(0)
    print(f"12 requests done in {scheduler.turn} turns, {scheduler.num_retractions} retractions")
    print(f"{scheduler.num_reused} tokens reused")
    print(f"{free} of {kv.num_pages} pages are free or cached")


if __name__ == "__main__":
    main()
