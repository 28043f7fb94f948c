"""Laws of the lengths on host and device (sgl#25818): the host's copy and its sum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cuda_host import unavailable
from kernel_kit import backend
from specpool import Engine, OrderError, SamplingParams, Shape
from specpool.engine.assets import corpus
from specpool.engine.attention import BACK_ENDS
from specpool.engine.attention.backend import BackEnd
from specpool.engine.attention.seq_lens import SeqLens
from specpool.engine.worker.row_state import RowState
from specpool.kernels import transfer
from specpool.kernels.launch import host_backend

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=str(unavailable()))


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def late(device: list[int], lo: list[int], hi: list[int]) -> SeqLens:
    """Lengths that the host knows bounds of only; a copy is on its way."""
    truth = torch.tensor(device, dtype=torch.int32)
    return SeqLens(truth, i32(*lo), i32(*hi), lambda: truth.numpy())


def test_an_unknown_sum_is_no_number():
    lens = late([5, 9], [4, 9], [7, 9])
    for use in (lambda: lens.seq_lens_sum + 1, lambda: int(lens.seq_lens_sum)):
        with pytest.raises(OrderError, match="the sum of 2 sequence lengths is not known"):
            use()
    lens.refresh_seq_lens_cpu(sync=False)
    assert lens.seq_lens_sum == 16


def test_without_sync_the_copy_stays_as_late_as_it_was():
    lens = late([5, 9], [4, 9], [7, 9])
    lens.refresh_seq_lens_cpu(sync=False)
    assert lens.seq_lens_cpu.tolist() == [7, 9] and not lens.is_exact
    lens.refresh_seq_lens_cpu(sync=True)
    assert lens.seq_lens_cpu.tolist() == [5, 9] and lens.is_exact and lens.seq_lens_sum == 14


def test_an_exact_copy_needs_no_sync():
    """Plain decoding: every length is known, so nothing waits for the device."""

    def never() -> np.ndarray:
        raise AssertionError("waited for the device")

    lens = SeqLens(torch.tensor([3, 4], dtype=torch.int32), i32(3, 4), i32(3, 4), never)
    lens.refresh_seq_lens_cpu(sync=True)
    assert lens.seq_lens_sum == 7


@pytest.mark.parametrize("was_known", [False, True])
def test_every_change_makes_the_sum_unknown(was_known):
    lens = late([5, 9, 2], [4, 9, 2], [7, 9, 2])
    if was_known:
        lens.refresh_seq_lens_cpu(sync=False)
    for changed, device, cpu in (
        (lens.filter(slice(1, 3)), [9, 2], [9, 2]),
        (lens.filter(np.array([True, False, True])), [5, 2], [7, 2]),
        (SeqLens.merge([lens, late([1], [0], [3])]), [5, 9, 2, 1], [7, 9, 2, 3]),
        (lens.ahead(2), [7, 11, 4], [9, 11, 4]),
        (lens.repeat(2), [5, 5, 9, 9, 2, 2], [7, 7, 9, 9, 2, 2]),
        (lens.grown(torch.tensor([1, 3, 2]), 1, 4), [6, 12, 4], [11, 13, 6]),
    ):
        with pytest.raises(OrderError, match="not known"):
            int(changed.seq_lens_sum)
        assert changed.on_device.tolist() == device
        changed.refresh_seq_lens_cpu(sync=False)
        assert changed.seq_lens_cpu.tolist() == cpu and changed.seq_lens_sum == sum(cpu)
        changed.refresh_seq_lens_cpu(sync=True)
        assert changed.seq_lens_cpu.tolist() == device and changed.seq_lens_sum == sum(device)


def test_a_late_refresh_of_a_filtered_batch_reads_its_own_rows():
    """The copy was sent before the batch was filtered."""
    lens = late([5, 9, 2], [4, 8, 0], [7, 12, 6]).filter(np.array([True, False, True]))
    lens.refresh_seq_lens_cpu(sync=True)
    assert lens.seq_lens_cpu.tolist() == [5, 2]


def test_a_merge_of_known_lengths_is_known():
    known = [SeqLens(torch.tensor([n], dtype=torch.int32), i32(n), i32(n)) for n in (3, 8)]
    assert SeqLens.merge(known).is_exact
    assert not SeqLens.merge([known[0], late([5], [4], [7])]).is_exact


def test_the_common_length_is_what_the_host_knows():
    assert late([4, 4], [4, 4], [4, 4]).common == 4
    assert late([4, 4], [4, 3], [4, 4]).common is None
    assert late([4, 5], [4, 5], [4, 5]).common is None


def test_a_length_beyond_what_was_reserved_is_clamped():
    """A step behind a failed one stays inside its plan's bounds (docs/contract.md)."""
    lens = late([90, 0], [4, 9], [7, 12])
    lens.refresh_seq_lens_cpu(sync=True)
    assert lens.seq_lens_cpu.tolist() == [7, 9]


def test_the_copy_is_sent_before_draft_extend():
    """A row state that a back end needs lengths of sends them when verify has put them."""
    with host_backend(backend("fast", "forward")):
        state = RowState(3, 1, torch.device("cpu"), needs_host_lengths=True)
        rows = i32(2, 3)
        lanes = state.lanes(rows, i32(0, 0), i32(9, 9))
        assert lanes.seq_lens.seq_lens_cpu.tolist() == [0, 0]
        state.put(lanes, torch.tensor([5, 6], dtype=torch.int32), torch.zeros(2, dtype=torch.int64))
        assert state.lanes(rows, i32(1, 1), i32(9, 9)).seq_lens.seq_lens_cpu.tolist() == [5, 6]
        vague = RowState(3, 1, torch.device("cpu"))
        assert vague.lanes(rows, i32(0, 0), i32(9, 9)).seq_lens.seq_lens_cpu.tolist() == [9, 9]


@pytest.mark.sample(2)
@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_round_waits_once_where_the_back_end_needs_lengths(monkeypatch, needs, depth):
    """It never waits if the back end needs no lengths: the text is the same."""
    monkeypatch.setitem(BACK_ENDS, "torch", BackEnd("torch", True, True, needs))
    waits = [0]
    refresh = SeqLens.refresh_seq_lens_cpu

    def counted(self, sync):
        waits[0] += sync and not self.is_exact
        refresh(self, sync)

    monkeypatch.setattr(SeqLens, "refresh_seq_lens_cpu", counted)
    copies = [0]
    init = transfer.Download.__init__

    def sent(self, tensor):
        copies[0] += tensor.dtype == torch.int32
        init(self, tensor)

    monkeypatch.setattr(transfer.Download, "__init__", sent)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    texts = []
    with host_backend(backend("fast", "forward")):
        for draft, shape in (("specpool/tiny-eagle", Shape.eagle(3, 1, 4)), (None, None)):
            options = {"shape": shape, "overlap_depth": depth}
            with Engine.from_pretrained(draft=draft, **options) as engine:
                (output,) = engine.generate(corpus.prompts(1), params)
            texts.append(output.token_ids)
            rounds = output.verify_ct
            if draft is None:
                assert waits[0] == 0  # its host copy is exact
            elif needs and depth:
                assert rounds - 2 <= waits[0] <= rounds + 1 and copies[0] > rounds
            else:
                assert waits[0] == 0
            waits[0] = copies[0] = 0
    assert texts[0] == texts[1]
