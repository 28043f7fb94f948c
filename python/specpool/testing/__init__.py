"""Tests for schedulers that embed specpool: strategies, a state machine, a leak check.

Needs `pip install 'specpool[testing]'`; `docs/testing.md` shows how the parts fit together.
"""

from specpool.testing.block_device import BlockDevice
from specpool.testing.block_machine import BlockMachine, BlockScheduler
from specpool.testing.device import DeviceFault, FakeDevice
from specpool.testing.leaks import assert_no_page_leaked, no_page_leaks
from specpool.testing.machine import Device, LedgerMachine, SchedulerUnderTest
from specpool.testing.operations import OP_BYTES, Operation, apply, decode_op
from specpool.testing.strategies import (
    LedgerConfig,
    accept_lens,
    any_shapes,
    ledger_configs,
    operation_codes,
    operation_sequences,
    shapes,
)

__all__ = [
    "OP_BYTES",
    "BlockDevice",
    "BlockMachine",
    "BlockScheduler",
    "Device",
    "DeviceFault",
    "FakeDevice",
    "LedgerConfig",
    "LedgerMachine",
    "Operation",
    "SchedulerUnderTest",
    "accept_lens",
    "any_shapes",
    "apply",
    "assert_no_page_leaked",
    "decode_op",
    "ledger_configs",
    "no_page_leaks",
    "operation_codes",
    "operation_sequences",
    "shapes",
]
