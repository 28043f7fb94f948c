"""The two kernels with bugs to plant (tests/kits/cuda_host/planted), and where their lines are."""

from pathlib import Path

import numpy as np

import cuda_host
from cuda_host import HostModule

PLANTED = Path(cuda_host.__file__).parent / "planted"


def line_of(path, text, after=""):
    """Number of the first line with `text` after the line with `after`."""
    lines = path.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if after in line)
    return next(i + 1 for i, line in enumerate(lines) if i >= first and text in line)


def move_rows(kind, order="forward", *flags):
    module = HostModule(PLANTED / "move_rows.cu", kind=kind, order=order, options=flags)
    return module.get_function("move_rows_kernel")


def prefix_sum(kind, order, *flags, n=1000, block=256):
    module = HostModule(PLANTED / "prefix_sum.cu", kind=kind, order=order, options=flags)
    lens = np.random.default_rng(n).integers(0, 9, n).astype(np.int32)
    offsets, total = np.full(n, -1, np.int32), np.zeros(1, np.int32)
    args = (offsets, total, lens, np.int32(n))
    module.get_function("prefix_sum_kernel")((1,), (block,), args, shared_mem=4)
    return lens, offsets, total
