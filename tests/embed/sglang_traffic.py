"""What is sent to SGLang's scheduler: requests, and sessions of several turns, from a seed."""

from __future__ import annotations

import random
from array import array
from typing import Any

from sglang.srt.managers.io_struct import (
    CloseSessionReqInput,
    OpenSessionReqInput,
    SessionParams,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_device import STOP, Text, digest

#: Turns of a session.
TURNS = 3


class Traffic:
    """Seeded requests, some with prefixes that others had, and sessions of several turns.

    What a request says depends on the seed and its number alone, not on how the engine runs.
    """

    def __init__(self, loop: Any) -> None:
        self.loop, setup = loop, loop.setup
        self.seed, self.tick = setup.seed, 0
        self.most: dict[str, int] = {}  # tokens that each request may say
        self.running: dict[str, Req] = {}
        rng = self._rng(0, 0)
        self.stems = [_tokens(rng, setup.most_prompt) for _ in range(3)]
        # When each request is sent, and how long a session thinks before a turn.
        last = 1 + setup.spread * setup.num_requests
        self.sends = sorted(rng.randint(1, last) for _ in range(setup.num_requests))
        self.turns = {f"s{at}": TURNS for at in range(setup.num_sessions)}
        self.busy: dict[str, str] = {}
        self.history: dict[str, list[int]] = {name: [] for name in self.turns}
        self.wakes = {name: rng.randint(1, 20) for name in self.turns}
        for name in self.turns:
            opened = OpenSessionReqInput(
                capacity_of_str_len=1 << 20, session_id=name, streaming=True
            )
            loop.session_controller.open(opened)

    def _rng(self, kind: int, number: int) -> random.Random:
        return random.Random(digest(self.seed, kind, number))

    def is_over(self) -> bool:
        """Whether all that was to be sent has ended."""
        return not self.sends and not any(self.turns.values()) and not self.running

    def turn(self) -> None:
        """Take what ended, and send what is due."""
        self.tick += 1
        for rid, req in list(self.running.items()):
            if req.finished():
                self._ended(rid, req)
        while self.sends and self.sends[0] <= self.tick:
            number = self.loop.setup.num_requests - len(self.sends)
            self.sends.pop(0)
            self._send(str(number), self._rng(1, number))
        for name, turns in self.turns.items():
            if turns and name not in self.busy and self.wakes[name] <= self.tick:
                self.turns[name] -= 1
                number = 1000 * (1 + int(name[1:])) + TURNS - turns
                self._send_turn(name, str(number), self._rng(1, number))

    def _ended(self, rid: str, req: Any) -> None:
        del self.running[rid]
        said = list(req.output_ids)
        if req.finished_len is not None:
            said = said[: req.finished_len]
        self.loop.outcome.texts[rid] = said
        for name in [name for name, busy in self.busy.items() if busy == rid]:
            del self.busy[name]
            self.wakes[name] = self.tick + self._rng(2, int(rid)).randint(0, 6)
            # SGLang's own: what a round accepted behind a stop begins the next turn's prompt.
            kept = list(req.output_ids)[: req.sampling_params.max_new_tokens]
            self.history[name] = list(req.origin_input_ids) + kept
            if len(kept) > len(said):
                self.loop.outcome.seen.add("tail")

    def _parameters(self, rng: random.Random) -> SamplingParams:
        most = rng.randint(1, self.loop.setup.most_answer)
        parameters = SamplingParams(max_new_tokens=most, temperature=0, stop_token_ids=[STOP])
        parameters.normalize(None)
        return parameters

    def _send(self, rid: str, rng: random.Random) -> None:
        stem = rng.choice(self.stems)
        prompt = stem[: rng.randint(1, len(stem))] + _tokens(rng, rng.randint(1, 9))
        parameters = self._parameters(rng)
        req = Req(rid, "", array("q", prompt), parameters, eos_token_ids={STOP}, vocab_size=1000)
        self._queue(rid, req, prompt)

    def _send_turn(self, name: str, rid: str, rng: random.Random) -> None:
        new = _tokens(rng, rng.randint(1, 40))
        asked = TokenizedGenerateReqInput(
            rid=rid,
            input_text="",
            input_embeds=None,
            token_type_ids=None,
            input_ids=array("q", new),
            mm_inputs=None,
            sampling_params=self._parameters(rng),
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            session_params=SessionParams(id=name),
        )
        session = self.loop.session_controller.get(name)
        req = session.create_req(asked, None, 1000, eos_token_ids={STOP})
        self.busy[name] = rid
        self.loop.outcome.seen.add("turn" if self.history[name] else "session")
        self._queue(rid, req, self.history[name] + new)

    def _queue(self, rid: str, req: Any, prompt: list[int]) -> None:
        loop = self.loop
        if list(req.origin_input_ids) != prompt:
            loop.outcome.faults.append(f"{rid}: SGLang's prompt is not the one sent")
        loop.init_req_max_new_tokens(req)
        loop.model_worker.texts[rid] = Text(prompt)
        self.most[rid] = req.sampling_params.max_new_tokens
        self.running[rid] = req
        loop._add_request_to_queue(req)

    def close(self) -> None:
        """Close every session."""
        for name in self.history:
            self.loop.session_controller.close(CloseSessionReqInput(session_id=name))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(3, 999) for _ in range(count)]
