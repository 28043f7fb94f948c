"""What breaks first on a new CUDA machine, in one minute: `python -m benches.probe`.

Each line is one question with its answer, in seconds or as an error. The order is by how likely the
answer stops everything after it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch


def ask(question: str, work: Callable[[], object]) -> bool:
    """Print a question, and the answer of `work` or its error; return whether it went well."""
    start = time.perf_counter()
    try:
        answer = work()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"FAILED {question}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return False
    seconds = time.perf_counter() - start
    print(f"{question}: {'' if answer is None else answer} ({seconds:.3f} s)", flush=True)
    return True


def versions() -> str:
    """Return the card and the libraries."""
    import cupy

    card = torch.cuda.get_device_name()
    return f"{card}, torch {torch.__version__}, CUDA {torch.version.cuda}, CuPy {cupy.__version__}"


def kernels() -> str:
    """Build all kernels and launch one."""
    from specpool.kernels import apply_table_delta, launch

    device = torch.device("cuda", 0)
    launch.prepare(device)
    table = torch.zeros(3, 4, dtype=torch.int32, device=device)
    row, column, page = (torch.tensor([n], dtype=torch.int32, device=device) for n in (1, 2, 7))
    apply_table_delta(table, row, column, page)
    assert table[1, 2] == 7, table
    return f"{len(launch.entries())} kernels"


def fused(dtype: torch.dtype) -> str:
    """Attend over a prompt of two lanes, beside the same in float32 on the CPU."""
    import numpy as np

    from specpool.engine.attention import AttentionView, attend

    outs, generator = [], torch.Generator().manual_seed(0)
    numbers = [torch.randn(n, h, 64, generator=generator) for n, h in ((12, 8), (12, 2), (12, 2))]
    for device, precision in (("cuda", dtype), ("cpu", torch.float32)):
        view = AttentionView(
            4,
            torch.tensor([*range(8, 15), *range(20, 25)], device=device),
            torch.tensor([[2, 3, 0], [4, 5, 6]], dtype=torch.int32, device=device),
            [7, 5],
            lambda window: torch.zeros(0),
            kv_lens=np.array([7, 9], np.int32),
            is_causal=True,
        )
        view.mask_for = lambda window: torch.stack(
            [torch.arange(12) <= torch.arange(7).unsqueeze(1) + start for start in (0, 4)]
        )
        k_buffer, v_buffer = (
            torch.ones(64, 2, 64, device=device, dtype=precision) for _ in range(2)
        )
        q, k, v = (x.to(device, precision) for x in numbers)
        outs.append(attend(view, k_buffer, v_buffer, q, k, v, scaling=0.2).float().cpu())
    return f"differs by {float((outs[0] - outs[1]).abs().max()):.1e}"


def new_lengths() -> str:
    """Attend at lengths that were not seen before: cuDNN would plan for each."""
    from torch.nn.functional import scaled_dot_product_attention

    from specpool.engine.attention.cudnn import without_cudnn

    seconds = []
    for length in (64, 80, 96, 112):
        q = torch.randn(1, 8, 4, 128, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(1, 8, length, 128, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        start = time.perf_counter()
        with without_cudnn(q.device):
            scaled_dot_product_attention(q, k, k, attn_mask=q.new_zeros(1, 1, 1, length))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return " ".join(f"{duration:.4f}" for duration in seconds)


def failed_capture(fault: str) -> str:
    """Capture after a capture that waited for the device or raised, and so failed."""
    from specpool.engine.worker.graphs.capture import CudaCapture
    from specpool.engine.worker.results import Outcome

    capture, cell = CudaCapture(torch.device("cuda", 0)), torch.zeros(1, 3, device="cuda")

    def work(fault: str = "") -> tuple[Outcome, Callable[[], None]]:
        if fault == "waited":
            cell.cpu()
        elif fault == "raised":
            raise RuntimeError("the work raises")
        cell.add_(1)
        return Outcome(cell, is_verify=False), lambda: None

    capture.warm_up(work)
    try:
        capture.record(lambda: work(fault), follows=False)
    except RuntimeError as error:
        first = str(error).partition("\n")[0][:80]
    else:
        first = "it was captured"
    recording = capture.record(work, follows=False)
    before = float(cell[0, 0])
    recording.decide()
    assert float(cell[0, 0]) == before + 1
    return f"the first: {first}; the second replays"


def engine() -> str:
    """Speak with the shipped pair, with graphs, beside plain decoding."""
    from specpool import Engine, SamplingParams, Shape

    params, texts = SamplingParams(max_new_tokens=40, ignore_eos=True), []
    for draft in ("specpool/tiny-eagle", None):
        shape = Shape.eagle(3, 1, 4) if draft else None
        with Engine.from_pretrained(
            draft=draft,
            shape=shape,
            device="cuda",
            dtype="float32",
            max_context_len=256,
            max_batch=8,
        ) as engine:
            (output,) = engine.generate(["The page"], params)
            graphs = engine.stats().graphs
            texts.append(output.token_ids)
            assert output.error is None, output.error
    assert texts[0] == texts[1], "drafting changed the text"
    return f"{graphs}"


def main() -> int:
    """Ask everything; 1 if an answer is an error."""
    if not torch.cuda.is_available():
        print("probe: torch finds no CUDA device here", file=sys.stderr)
        return 2
    answers = [
        ask("versions", versions),
        ask("kernels", kernels),
        ask("a prompt in bfloat16", partial(fused, torch.bfloat16)),
        ask("a prompt in float32", partial(fused, torch.float32)),
        ask("new lengths", new_lengths),
        *(
            ask(f"a capture after one that {fault}", partial(failed_capture, fault))
            for fault in ("raised", "waited")
        ),
        ask("the shipped pair", engine),
    ]
    return int(not all(answers))


if __name__ == "__main__":
    sys.exit(main())
