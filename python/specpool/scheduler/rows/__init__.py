"""Who holds rows of the ledger: requests that run, and conversations between their turns."""
