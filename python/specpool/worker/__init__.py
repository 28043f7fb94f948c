"""What a step computes on the device: prefill, draft, verify, compact, draft-extend."""
