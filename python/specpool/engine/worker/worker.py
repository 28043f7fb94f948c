"""`Worker`: runs the steps of the scheduler on the device.

A step is a `PrefillChunk`, a `PlainRound` or a `DraftRound`. Each launches its part of the target's
forward, makes its outcome of the forward's output, and follows with what only later steps need.

The worker decides nothing: rows, shapes and pages come from the plan. It does not wait for the
device either: values for the next step stay on the device (`RowState`), and values for the host are
copied right after verify, while draft-extend still runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from specpool._core import Ledger, Plan, Shape
from specpool.engine.attention import BackEnd, Started
from specpool.engine.attention.cudnn import without_cudnn
from specpool.engine.attention.lanes import Lanes
from specpool.engine.draft.base import Drafter
from specpool.engine.memory.kv_cache import KVCache
from specpool.engine.models.recurrent import RecurrentState
from specpool.engine.models.target import TargetModel
from specpool.engine.scheduler.step import Step
from specpool.engine.worker.draft_round import DraftRound
from specpool.engine.worker.followers import Followers
from specpool.engine.worker.forward import Forward
from specpool.engine.worker.graphs.capture import Capture
from specpool.engine.worker.graphs.graphs import Graphs
from specpool.engine.worker.graphs.round_graph import RoundKind
from specpool.engine.worker.plain_round import PlainRound
from specpool.engine.worker.prefill_chunk import PrefillChunk
from specpool.engine.worker.processors import Processors
from specpool.engine.worker.proposer import Proposer
from specpool.engine.worker.results import Outcome, PendingStep
from specpool.engine.worker.row_state import RowState
from specpool.engine.worker.step_work import RoundContext, StepWork
from specpool.kernels.launch import runs_kernels


class Worker:
    """A runner of the target, and of drafters if there are any, on the rows of a plan (v2).

    Attributes:
        graphs: the captured rounds; None if none were captured.
    """

    def __init__(
        self,
        target: TargetModel,
        drafters: Sequence[Drafter],
        cache: KVCache,
        *,
        target_groups: Sequence[int],
        shapes: Sequence[Shape],
        max_context_len: int,
        attention: BackEnd,
        state: RecurrentState | None = None,
    ) -> None:
        """Work on `cache`, whose first layers are the target's.

        Args:
            target: the model.
            drafters: attached to `cache`; `Request.drafter` is an index into them.
            cache: holds the KV of all.
            target_groups: the group of each of the target's layers.
            shapes: the ledger's shapes.
            max_context_len: positions at or beyond it are clamped to the last one.
            attention: the back end; its `needs_host_lengths` makes rounds wait for their lengths.
            state: the slots and rings of the target's recurrent layers; None if it has none.
        """
        self.graphs: Graphs | None = None
        device, num_rows = cache.device, cache.tables[0].shape[0] - 1
        followers = Followers(drafters, num_rows)
        self._context = RoundContext(
            cache=cache,
            rows=RowState(
                num_rows,
                max(shape.num_draft_tokens for shape in shapes),
                device,
                # On a CPU reading the lengths costs no wait, and exact lengths save masked reads.
                # Mixers without kernels read lanes that the host groups by length.
                needs_host_lengths=attention.needs_host_lengths
                or not runs_kernels(device)
                or (target.mixers is not None and not target.mixers.has_kernels),
            ),
            forward=Forward(
                target,
                cache,
                target_groups,
                feature_layers=followers.feature_layers,
                state=state,
            ),
            proposer=Proposer(drafters, target.vocab_size, device),
            processors=Processors(num_rows, target.vocab_size, device),
            followers=followers,
            shapes=list(shapes),
            target_fields={
                group: cache.fields([i for i, g in enumerate(target_groups) if g == group])
                for group in sorted(set(target_groups))
            },
            state=state,
            has_windows=any(cache.windows[group] is not None for group in target_groups),
            last_position=max_context_len - 1,
        )

    def capture(
        self,
        capture: Capture,
        ledger: Ledger,
        sizes: Mapping[RoundKind, Sequence[int]],
        attention: Started | None,
    ) -> Graphs:
        """Capture CUDA graphs of rounds, before any request runs; see `Graphs`."""
        recorder = None if attention is None else attention.recorder
        cache, rows = self._context.cache, self._context.rows
        self.graphs = Graphs(capture, ledger, cache, rows, recorder)
        with without_cudnn(cache.device):
            self.graphs.build(sizes, self.decide)
        return self.graphs

    @torch.inference_mode()
    def run(self, steps: Sequence[Step]) -> list[PendingStep]:
        """Run one forward for launched steps: for one step, or for a prefill and a round together.

        A round that has a graph is replayed.
        """
        with without_cudnn(self._context.cache.device):
            replayed = None if self.graphs is None else self.graphs.replay(steps, self._catch_up)
            pending: list[PendingStep] = []
            if replayed is not None:
                pending.append(replayed)
            else:
                works: list[StepWork] = [
                    self._round(step)
                    if step.is_decode
                    else PrefillChunk(self._context, step.plan, step.requests)
                    for step in steps
                ]
                passes = [work.launch() for work in works]
                outputs = self._context.forward.run(passes, [step.plan for step in steps])
                for work, output in zip(works, outputs, strict=True):
                    # The copy to the host starts before the work that only later steps need.
                    pending.append(PendingStep(work.requests, work.outcome(output)))
                    work.follow()
        for step in steps:
            if step.is_decode:
                self._context.followers.note(step.plan)
        return pending

    def decide(self, kind: RoundKind, lanes: Lanes) -> tuple[Outcome, Callable[[], None]]:
        """Launch a round whose lanes only the device knows, for the capture of a graph.

        Tokens are drawn with the rows' own parameters, so they are the same as `run` draws.

        Returns:
            The outcome, and the function that launches the rest of the round.
        """
        work: StepWork
        if kind.shape.num_draft_tokens == 1:
            work = PlainRound(self._context, lanes, (), writes_draft=kind.writes_draft)
        else:
            work = DraftRound(self._context, lanes, (), runs=[(kind.shape, len(lanes.seq_lens))])
        (output,) = self._context.forward.run([work.launch()], ())
        return work.outcome(output), work.follow

    def _round(self, step: Step) -> StepWork:
        """Return the work of a round, which takes rows, length bounds and shapes from its plan."""
        plan, requests = step.plan, step.requests
        lanes = self._context.rows.lanes(plan.rows, plan.lo, plan.hi)
        if not plan.shapes.any():
            return PlainRound(self._context, lanes, requests, writes_draft=plan.writes_draft)
        self._catch_up(plan)
        ends = [*(np.flatnonzero(np.diff(plan.shapes)) + 1).tolist(), len(plan)]
        runs = [
            (self._context.shapes[plan.shapes[start]], end - start)
            for start, end in itertools.pairwise([0, *ends])
        ]
        return DraftRound(self._context, lanes, requests, runs=runs)

    def _catch_up(self, plan: Plan) -> None:
        """Let the drafters write the KV that plain rounds have put off."""
        self._context.followers.catch_up(plan, self._context.rows)
