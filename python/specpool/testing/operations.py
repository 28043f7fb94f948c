"""`Operation`: a call of a ledger as a value, made from bytes by `decode_op`, run by `apply`."""

from __future__ import annotations

from typing import Any, TypeAlias

from specpool import Ledger
from specpool._core import OP_BYTES, decode_op

__all__ = ["OP_BYTES", "Operation", "apply", "decode_op"]

# ("prepare_decode", {"rows": [1, 2], "shapes": [1, 0], "writes_draft": True}): a method of `Ledger`
# and its keyword arguments.
Operation: TypeAlias = tuple[str, dict[str, Any]]


def apply(ledger: Ledger, operation: Operation) -> Any:
    """Call the verb and return its result.

    Raises:
        SpecpoolError: the ledger refuses the call, and has not changed.
    """
    verb, arguments = operation
    return getattr(ledger, verb)(**arguments)
