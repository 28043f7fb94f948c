"""The holders of the ledger's rows: running requests, and conversations between turns."""
