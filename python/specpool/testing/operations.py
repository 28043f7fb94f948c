"""One operation on a ledger as a value: `(verb, arguments)`, made from bytes, applied by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from specpool import Ledger

# ("prepare_decode", {"rows": [1, 2], "shapes": [1, 0], "writes_draft": True}): a method of `Ledger`
# and its keyword arguments.
Operation: TypeAlias = tuple[str, dict[str, Any]]

# Bytes of a code.
CODE_LEN = 16


def apply(ledger: Ledger, operation: Operation) -> Any:
    """Calls the verb and returns its answer.

    Raises:
        SpecpoolError: the ledger refuses the call, and has not changed.
    """
    verb, arguments = operation
    return getattr(ledger, verb)(**arguments)


def decode_op(ledger: Ledger, code: bytes) -> Operation:
    """An operation that mostly can succeed on the ledger as it is now.

    The same ledger state and code give the same operation; zeros give the plainest one. One
    operation in 32 has arbitrary arguments.

    Args:
        ledger: only looked at.
        code: `CODE_LEN` bytes.
    """
    left = int.from_bytes(code, "little")

    def choose(count: int) -> int:
        nonlocal left
        left, chosen = divmod(left, count)
        return chosen

    if choose(32) == 31:
        return _arbitrary(ledger, choose)
    makers = _possible(ledger, choose)
    at = choose(sum(weight for weight, _ in makers))
    for weight, maker in makers:
        if at < weight:
            return maker()
        at -= weight
    raise AssertionError("the weights do not add up")


_Maker: TypeAlias = Callable[[], Operation]


def _possible(ledger: Ledger, choose: Callable[[int], int]) -> list[tuple[int, _Maker]]:
    """Every verb that the ledger's state has a use for, with how often it is to come."""
    resolved, in_flight = ledger.resolved_len, ledger.in_flight
    live = [row for row in range(1, ledger.num_rows + 1) if ledger.is_live(row)]
    context, chunk = ledger.max_context_len, ledger.max_chunk or ledger.max_context_len
    steps = ledger.steps()
    unlaunched = [step for step, _, stage in steps if stage in ("prepared", "stale")]
    launched = [step for step, _, stage in steps if stage in ("launched", "resolved")]
    rounds = [step for step, kind, stage in steps if kind == "decode" and stage == "launched"]
    stale = any(stage == "stale" for _, _, stage in steps)
    extendable = [row for row in live if in_flight[row] == 0 and resolved[row] < context]
    decodable = [
        row
        for row in live
        if 0 < resolved[row] < context and in_flight[row] <= ledger.overlap_depth
    ]
    held = [row for row in live if resolved[row] > 0]
    still = [row for row in held if in_flight[row] == 0]
    is_quiet = not unlaunched and all(step <= ledger.completed for step in launched)

    def some(rows: list[int]) -> list[int]:
        rows = list(rows)
        count = 1 + choose(min(len(rows), ledger.max_batch))
        return [rows.pop(choose(len(rows))) for _ in range(count)]

    def one(rows: list[int]) -> int:
        return rows[choose(len(rows))]

    def admit() -> Operation:
        if not ledger.prefixes or choose(3) == 2:
            return "admit", {"tag": f"request {choose(100)}"}
        prefix = one(ledger.prefixes)
        length = ledger.prefix_len(prefix) - choose(ledger.prefix_len(prefix))
        return "admit", {"prefix": prefix, "length": length}

    def extend() -> Operation:
        rows = some(extendable)
        room = [min(chunk, int(context - resolved[row])) for row in rows]
        new_lens = [
            int(resolved[row]) + 1 + choose(most) for row, most in zip(rows, room, strict=True)
        ]
        drafts = {"writes_draft": choose(8) < 7}
        return "prepare_extend", {"rows": rows, "new_lens": new_lens, **drafts}

    def decode() -> Operation:
        rows = some(decodable)
        shapes = [len(ledger.shapes) - 1 - choose(len(ledger.shapes)) for _ in rows]
        drafts = {"writes_draft": choose(8) < 7}
        return "prepare_decode", {"rows": rows, "shapes": shapes, **drafts}

    def resolve() -> Operation:
        step = rounds[0] if choose(4) < 3 else one(rounds)
        # The lanes of a step are not public: the driver's business, see `Lockstep`.
        return "resolve", {"step": step, "accept_lens": [1 + choose(4) for _ in range(8)]}

    def cut(verb: str) -> Operation:
        row = one(live)
        length = max(0, int(resolved[row] + in_flight[row]) - choose(8) * choose(4))
        return verb, {"row": row, "length": length}

    def of_row(verb: str, rows: list[int]) -> _Maker:
        return lambda: (verb, {"row": one(rows)})

    def of_step(verb: str, of: list[int]) -> _Maker:
        return lambda: (verb, {"step": one(of)})

    def pin() -> Operation:
        row = one(held)
        length = int(resolved[row]) - choose(int(resolved[row])) // 4
        return "pin_prefix", {"row": row, "length": length}

    makers: list[tuple[int, bool, _Maker]] = [
        (14, bool(ledger.num_free_rows), admit),
        (20, bool(extendable) and not stale, extend),
        (40, bool(decodable) and not stale, decode),
        (40, bool(unlaunched) and not stale, of_step("launch", unlaunched[:1])),
        (30 if stale else 4, bool(unlaunched), of_step("cancel", unlaunched[-1:])),
        (30, bool(rounds), resolve),
        (16, bool(launched), of_step("complete", launched)),
        (1, bool(launched), of_step("abandon", launched)),
        (4, bool(steps), of_step("take_delta", [step for step, _, _ in steps])),
        (4, bool(steps), of_step("ack_delta", [step for step, _, _ in steps])),
        (5, bool(live), lambda: cut("trim")),
        (5, bool(live), lambda: cut("end_turn")),
        (1, bool(live), of_row("retract", live)),
        (1, bool(live), of_row("finish", live)),
        (1, bool(live), of_row("abort", live)),
        (8, bool(held), pin),
        (2, bool(ledger.prefixes), lambda: ("release_prefix", {"prefix": one(ledger.prefixes)})),
        (20 if is_quiet else 2, bool(still and ledger.num_free_rows), of_row("fork", still)),
    ]
    return [(weight, maker) for weight, possible, maker in makers if possible]


def _arbitrary(ledger: Ledger, choose: Callable[[int], int]) -> Operation:
    def number() -> int:
        return choose(ledger.max_context_len + 4) - 2

    step = number() + max((step for step, _, _ in ledger.steps()), default=0)
    several = [number() for _ in range(choose(3))]
    operations: list[Operation] = [
        ("admit", {"prefix": number(), "length": number()}),
        ("prepare_extend", {"rows": several, "new_lens": [number() for _ in several]}),
        ("prepare_decode", {"rows": several, "shapes": [number() for _ in several]}),
        ("resolve", {"step": step, "accept_lens": several}),
        *((verb, {"step": step}) for verb in ("launch", "complete", "cancel", "abandon")),
        *((verb, {"row": number()}) for verb in ("fork", "retract", "finish", "abort")),
        *(
            (verb, {"row": number(), "length": number()})
            for verb in ("trim", "end_turn", "pin_prefix")
        ),
        ("release_prefix", {"prefix": number()}),
    ]
    return operations[choose(len(operations))]
