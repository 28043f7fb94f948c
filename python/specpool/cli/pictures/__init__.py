"""Draw a recorded ledger, in the terminal or on a page."""
