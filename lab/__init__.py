"""The laboratory: simulators and comparisons that run from a checkout; no wheel has it."""
