"""Pictures of a recorded ledger, for the terminal or an HTML page."""
