"""Bugs of the scheduler and its engine, planted for a simulation to find."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq

import numpy as np

from lab.sim import Settings, SimDevice
from specpool.engine.memory.host.texts import HostTexts
from specpool.engine.memory.host.tier import HostTier
from specpool.engine.scheduler.pins import Pins
from specpool.engine.scheduler.prefix_cache import PrefixCache
from specpool.engine.scheduler.queues import Running, Waiting
from specpool.engine.scheduler.reclaim import Reclaim
from specpool.engine.scheduler.request import Request
from specpool.engine.scheduler.round_shapes import RoundShapes
from specpool.engine.scheduler.scheduler import Scheduler
from specpool.errors import OutOfPages, SpecpoolError


class Lying:
    """The ledger, but for what is overridden."""

    def __init__(self, ledger):
        self._ledger = ledger

    def __getattr__(self, name):
        return getattr(self._ledger, name)


def lie(patch, **methods) -> None:
    ledger = Settings.ledger
    kind = type("Lying", (Lying,), methods)
    patch.setattr(Settings, "ledger", lambda settings: kind(ledger(settings)))


def drop_a_retracted_request(patch):
    def requeue(self, request):
        self._state.running.remove(request)
        self._state.running.leave(request)
        self._state.num_retracted += 1

    patch.setattr(Reclaim, "requeue", requeue)


def admit_the_last_first(patch):
    def first(self):
        return min(self, key=lambda r: (-r.priority, -r.request_id))

    patch.setattr(Waiting, "first", property(first))


def put_the_retracted_behind(patch):
    requeue = Reclaim.requeue

    def behind(self, request):
        requeue(self, request)
        waiting = self._state.waiting
        waiting.remove(request)
        waiting.tidy()
        heapq.heappush(waiting._orders, (1 << 40, request.request_id))
        waiting._requests[request.request_id] = request

    patch.setattr(Reclaim, "requeue", behind)


def retract_the_first(patch):
    def make_room(self):
        victim = next(iter(self._state.running))
        if len(self._state.running) > 1:
            self.before_release(victim)
            self._state.rows.retract(victim.row)
            self.requeue(victim)

    patch.setattr(Reclaim, "make_room", make_room)


def retract_without_draining(patch):
    schedule = Scheduler.schedule

    def hasty(self):
        steps = schedule(self)
        state = self.state
        if not steps and state.in_flight and len(state.running) > 1 and self._is_starved:
            self._reclaim.make_room()
        return steps

    patch.setattr(Scheduler, "schedule", hasty)


def keep_the_row_of_who_ended(patch):
    end = Reclaim.end

    def leaky(self, request, reason):
        if reason == "stop":
            request.finish_reason = reason
            self._state.running.remove(request)
            self._state.running.leave(request)
        else:
            end(self, request, reason)

    patch.setattr(Reclaim, "end", leaky)


def give_tokens_to_dropped_lanes(patch):
    take_over = Scheduler.take_over

    def careless(self, step, result):
        dropped = [
            (request, tokens)
            for i, (request, tokens) in enumerate(zip(step.requests, result.tokens, strict=True))
            if self.state.ledger.epoch[step.plan.rows[i]] != step.plan.epochs[i]
        ]
        take_over(self, step, result)
        for request, tokens in dropped:
            request.tokens += tokens

    patch.setattr(Scheduler, "take_over", careless)


def forget_a_resolve(patch):
    lie(patch, resolve=lambda self, step, lens: step % 16 and self._ledger.resolve(step, lens))


def resolve_one_token_alone(patch):
    lie(patch, resolve=lambda self, step, lens: self._ledger.resolve(step, np.ones_like(lens)))


def hand_pages_out_early(patch):
    def launch(self, step):
        self._ledger.launch(step)
        self._ledger.complete(step)

    lie(patch, launch=launch, complete=lambda self, step: None)


def lose_a_table_delta(patch):
    def take_delta(self, step):
        delta = self._ledger.take_delta(step)
        return delta if step % 8 else [tuple(part[:0] for part in group) for group in delta]

    lie(patch, take_delta=take_delta)


def end_everybody_at_a_fault(patch):
    fail = Scheduler.fail

    def broad(self, step, error):
        fail(self, step, error)
        for request in list(self.state.running):
            self._reclaim.end(request, "error")

    patch.setattr(Scheduler, "fail", broad)


def forget_the_text_at_retraction(patch):
    requeue = Reclaim.requeue

    def forgetful(self, request):
        del request.tokens[request.prompt_len :]
        requeue(self, request)

    patch.setattr(Reclaim, "requeue", forgetful)


def say_a_token_twice(patch):
    append = Request.append

    def stammer(self, tokens, **options):
        append(self, tokens * 2 if len(tokens) > 3 else tokens, **options)

    patch.setattr(Request, "append", stammer)


def overlook_stop_tokens(patch):
    append = Request.append

    def deaf(self, tokens, **options):
        self.stop_ids = frozenset()
        append(self, tokens, **options)

    patch.setattr(Request, "append", deaf)


def draft_from_old_tokens(patch):
    init = Scheduler.__init__

    def blind(self, ledger, config, **options):
        init(self, ledger, dataclasses.replace(config, reads_tokens=False), **options)

    patch.setattr(Scheduler, "__init__", blind)


def run_too_many(patch):
    init = Scheduler.__init__

    def greedy(self, ledger, config, **options):
        more = dataclasses.replace(config, prefill_tokens=config.prefill_tokens + 1)
        init(self, ledger, more, **options)

    patch.setattr(Scheduler, "__init__", greedy)


def leave_a_row_out(patch):
    decode = Scheduler._decode

    def unfair(self, *chosen):
        running = self.state.running
        row = list(running)[-1].row if running else 0
        limit, running.limits[row] = running.limits[row], 0
        step = decode(self, *chosen)
        running.limits[row] = limit
        return step

    patch.setattr(Scheduler, "_decode", unfair)


def admit_again_before_whom_it_made_room_for(patch):
    init = Scheduler.__init__

    def hurried(self, *args, **options):
        init(self, *args, **options)
        make_room = self._reclaim.make_room

        def and_fill():
            make_room()
            self._is_starved = False
            self._admission.admit()

        self._reclaim.make_room = and_fill

    patch.setattr(Scheduler, "__init__", hurried)


def keep_pages_for_nobody(patch):
    def schedule(self):
        while True:
            if not self._is_starved:
                self._admission.admit()
            chosen = self.round_shapes.choose(self.state.running.limits)
            prepared = self._prefill.chunk(), self._decode(*chosen)
            steps = [step for step in prepared if step is not None]
            self.state.in_flight += len(steps)
            if steps or self.state.in_flight or not self.state.running:
                return steps
            self._reclaim.make_room()

    patch.setattr(Scheduler, "schedule", schedule)


def lose_page_copies(patch):
    patch.setattr(SimDevice, "_copy_pages", lambda self, forward: None)


def copy_too_few_tokens(patch):
    def copy(self, forward):
        done = forward.has_copied
        copy_pages(self, forward)
        if not done and self._has_memory:
            for g, _, page, num_tokens in forward.plan.page_copies.tolist():
                self._page(g, page)[num_tokens - 1] = 0

    copy_pages = SimDevice._copy_pages
    patch.setattr(SimDevice, "_copy_pages", copy)


def fork_somebody_else(patch):
    def fork(self, row, tag):
        live = [r for r in range(1, self._ledger.num_rows + 1) if self._ledger.is_live(r)]
        fits = [r for r in live if self._ledger.resolved_len[r] == self._ledger.resolved_len[row]]
        return self._ledger.fork(next((r for r in fits if r != row), row), tag)

    lie(patch, fork=fork)


def forget_samples_without_a_row(patch):
    add = Waiting.add

    def forgetful(self, request):
        if not (request.sample and request.num_retractions == 0):
            add(self, request)

    patch.setattr(Waiting, "add", forgetful)


def give_samples_the_first_ones_tokens(patch):
    start = Running.start

    def same(self, request, row, prefilled_len):
        if request.sample and self.requests:
            request.watch = None
            request.tokens = self.requests[0].tokens
        start(self, request, row, prefilled_len)

    patch.setattr(Running, "start", same)


def prefill_samples_anew(patch):
    def fork(self, row, tag):
        return self._ledger.admit(tag)

    lie(patch, fork=fork)
    start = Running.start
    patch.setattr(
        Running,
        "start",
        lambda self, request, row, n: start(
            self, request, row, min(n, int(self._ledger.resolved_len[row]))
        ),
    )


def take_a_pin_for_what_it_is_not(patch):
    def longest(self, tokens):
        pins = sorted(self._pins, key=lambda pin: -len(pin.tokens))[: len(tokens) > 1]
        return [(pin, min(len(pin.tokens), len(tokens) - 1)) for pin in pins]

    patch.setattr(Pins, "shared_with", longest)


def take_the_shortest_pin(patch):
    longest = Pins.shared_with
    patch.setattr(Pins, "shared_with", lambda self, tokens: longest(self, tokens)[::-1])


def find_no_pin(patch):
    patch.setattr(Pins, "shared_with", lambda self, tokens: [])


def keep_the_pages_of_a_dropped_pin(patch):
    def drop(self, pin):
        if pin in self._pins:
            self._pins.remove(pin)

    patch.setattr(Pins, "drop", drop)


def drop_the_newest_pin(patch):
    patch.setattr(Pins, "drop_oldest", lambda self: self.drop(self._pins[-1]))


def retract_before_a_pin_is_dropped(patch):
    def make_room(self):
        pins = self._state.pins
        if len(self._state.running) > 1:
            self._state.pins = ()
        room(self)
        self._state.pins = pins

    room = Reclaim.make_room
    patch.setattr(Reclaim, "make_room", make_room)


def drop_pins_without_draining(patch):
    schedule = Scheduler.schedule

    def hasty(self):
        if self.state.in_flight and self.pins and self._is_starved:
            self.pins.drop_oldest()
        return schedule(self)

    patch.setattr(Scheduler, "schedule", hasty)


def pin_pages_that_another_takes(patch):
    def pin_prefix(self, row, length):
        prefix = self._ledger.pin_prefix(row, length)
        self._ledger.release_prefix(prefix)
        return prefix

    lie(
        patch,
        pin_prefix=pin_prefix,
        prefix_len=lambda self, prefix: 1,
        release_prefix=lambda self, prefix: None,
    )


def run_on_behind_a_stop_string(patch):
    patch.setattr(Request, "_look_for_stop", lambda self, watch, new: None)


def keep_the_text_behind_a_stop_string(patch):
    def look(self, watch, new):
        num_tokens = len(self.tokens)
        tokens = list(self.tokens)
        look_for_stop(self, watch, new)
        self.tokens += tokens[len(self.tokens) : num_tokens]

    look_for_stop = Request._look_for_stop
    patch.setattr(Request, "_look_for_stop", look)


def search_in_dropped_tokens(patch):
    def append(self, tokens, **options):
        if self.watch is not None:
            self.watch.push([])
            self.watch._num_tokens += max(0, len(self.tokens) + len(tokens) - self.max_len)
        append_(self, tokens, **options)

    append_ = Request.append
    patch.setattr(Request, "append", append)


def let_go_of_a_window_too_early(patch):
    """The ledger reckons with a window of half the length."""
    ledger = Settings.ledger

    def narrow(settings):
        window = settings.window and max(1, settings.window // 2)
        return ledger(dataclasses.replace(settings, window=window))

    patch.setattr(Settings, "ledger", narrow)


def write_no_draft_kv_in_plain_rounds(patch):
    def prepare_decode(self, rows, shapes, *, writes_draft):
        drafts = bool(np.asarray(shapes).any())
        return self._ledger.prepare_decode(rows, shapes, writes_draft=writes_draft and drafts)

    lie(patch, prepare_decode=prepare_decode)


def run_what_was_chosen_before(patch):
    choose = RoundShapes.choose

    def late(self, limits, spare=None):
        before = self.choice
        chosen = choose(self, limits, spare)
        if before is None or self.budget is not None:
            return chosen
        line = self._lines[before.shape]
        return self._following[line], self._order[line]

    patch.setattr(RoundShapes, "choose", late)


def overlook_a_cap(patch):
    allowed = RoundShapes.allowed
    patch.setattr(
        RoundShapes, "allowed", lambda self, default, max_steps: allowed(self, default, None)
    )


def lose_the_last_page_of_a_hit(patch):
    def admit_cached(self, tokens, salt, tag, *, needs_draft=False):
        hit_len, *_ = self._ledger.match_prefix(tokens, salt, needs_draft=needs_draft)
        P = self._ledger.groups[0].page_size
        limit = max(hit_len - 1, 0) // P * P
        return self._ledger.admit_cached(tokens, salt, tag, limit=limit, needs_draft=needs_draft)

    lie(patch, admit_cached=admit_cached)


def share_texts_across_salts(patch):
    def index(self, row, tokens, salt):
        return self._ledger.index(row, tokens)

    def admit_cached(self, tokens, salt, tag, *, needs_draft=False):
        return self._ledger.admit_cached(tokens, b"", tag, needs_draft=needs_draft)

    lie(patch, index=index, admit_cached=admit_cached)


def take_a_hit_without_draft_kv(patch):
    patch.setattr(PrefixCache, "_needs_draft", lambda self, request: False)


def index_the_text_of_another_row(patch):
    texts = []

    def index(self, row, tokens, salt):
        texts.append(tokens)
        other = next((text for text in texts if len(text) >= len(tokens)), tokens)
        return self._ledger.index(row, other[: len(tokens)], salt)

    lie(patch, index=index)


def keep_a_row_for_the_index(patch):
    index = PrefixCache.index

    def fork(self, request, end=None):
        index(self, request, end)
        if request.indexed_len > 4 and end is None and self._ledger.num_free_rows > 1:
            with contextlib.suppress(SpecpoolError):
                self._ledger.fork(request.row)

    patch.setattr(PrefixCache, "index", fork)


def retract_before_texts_give_way(patch):
    def prepare(self, rows, *arguments, **named):
        plan = self._ledger.prepare_decode(rows, *arguments, **named)
        before = self._ledger.index_size[2]
        if before > self._evictions:
            self._evictions = before
            self._ledger.cancel(plan.step)
            raise OutOfPages("none", self._ledger.groups[0].name, 1, 0, 0, 0, 0)
        return plan

    lie(patch, prepare_decode=prepare, _evictions=0)


def know_a_block_by_its_own_tokens_alone(patch):
    def keys(self, tokens, salt):
        for end in range(self.block_len, len(tokens) + 1, self.block_len):
            yield salt + bytes(tokens[end - self.block_len : end] % 2)

    patch.setattr(HostTexts, "keys", keys)


def give_blocks_away_that_a_reload_uses(patch):
    def lend(self, *arguments, **named):
        handle = lend_text(self, *arguments, **named)
        for block in handle.blocks if handle else ():
            block.users = 0
        return handle

    lend_text = HostTier.lend
    patch.setattr(HostTier, "lend", lend)


PLANTS = {
    write_no_draft_kv_in_plain_rounds: "DraftLag|draft KV",
    run_what_was_chosen_before: "runs with shape",
    overlook_a_cap: "steps at most",
    drop_a_retracted_request: "have not ended",
    admit_the_last_first: "was admitted before request",
    put_the_retracted_behind: "was admitted before request .*, retracted [1-9]",
    retract_the_first: "is retracted, not request",
    # Making room drops a pin first if there is one.
    retract_without_draining: "(retracted|a pin is dropped) while results are still to come",
    keep_the_row_of_who_ended: "its client|pages free, .* held by running|leak|livelock",
    give_tokens_to_dropped_lanes: "went on after its end",
    forget_a_resolve: "OrderError|left out|livelock|not all in|retracted, though",
    resolve_one_token_alone: "keeps KV of|the true roots .* are not all in|livelock",
    hand_pages_out_early: "position .* slot .* holds|OrderError|not written",
    lose_a_table_delta: "has no page|holds|not written",
    end_everybody_at_a_fault: "by error",
    forget_the_text_at_retraction: "had .* tokens, and has",
    say_a_token_twice: "speaks otherwise than alone",
    overlook_stop_tokens: "speaks otherwise|alone it would after .* by stop",
    draft_from_old_tokens: "drafts from .* tokens",
    run_too_many: "prefills .* tokens",
    leave_a_row_out: "left out|livelock|kv_exhausted|has a row again",
    admit_again_before_whom_it_made_room_for: "has a row again",
    keep_pages_for_nobody: "livelock|retracted, though|kv_exhausted",
    lose_page_copies: "position .* (is not written|holds)",
    copy_too_few_tokens: "position .* (is not written|holds)",
    fork_somebody_else: "position .* slot .* holds|PageStateError|NotReady",
    # The forgotten sample may be missed first in the order of admission.
    forget_samples_without_a_row: "have not ended|was admitted before request",
    give_samples_the_first_ones_tokens: "speaks otherwise|tokens, and has|alone it would",
    prefill_samples_anew: "is prefilled from 0 on, it shares",
    take_a_pin_for_what_it_is_not: "position .* slot .* holds|is prefilled from",
    take_the_shortest_pin: "is prefilled from .* on, it shares",
    find_no_pin: "is prefilled from 0 on, it shares",
    keep_the_pages_of_a_dropped_pin: "is held by|leak",
    drop_the_newest_pin: "they are not the oldest",
    retract_before_a_pin_is_dropped: "and a pinned text kept",
    drop_pins_without_draining: "a pin is dropped while results are still to come",
    pin_pages_that_another_takes: "is held by|no such prefix|ShapeError",
    run_on_behind_a_stop_string: "alone it would after .* by stop",
    keep_the_text_behind_a_stop_string: "alone it would after .* by stop",
    search_in_dropped_tokens: "alone it would after .* by length|IndexError",
    let_go_of_a_window_too_early: "position .* has no page",
    lose_the_last_page_of_a_hit: "is prefilled from .* on, it shares",
    share_texts_across_salts: "is prefilled from .* on, it shares",
    take_a_hit_without_draft_kv: "is prefilled from .* on, it shares|position .* slot .* holds",
    index_the_text_of_another_row: "position .* slot .* holds|is prefilled from .* on, it shares",
    keep_a_row_for_the_index: "is held by|leak|pages free",
    know_a_block_by_its_own_tokens_alone: "position .* slot .* holds",
    give_blocks_away_that_a_reload_uses: "host page|position .* holds|IndexError|KeyError",
    retract_before_texts_give_way: "is retracted, though|kv_exhausted",
}
