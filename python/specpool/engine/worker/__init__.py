"""The work of a step on the device: prefill, draft, verify, compact, draft-extend."""
