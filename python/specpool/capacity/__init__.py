"""What fits into a number of bytes: the sizes of a ledger's groups, and the rows that they hold."""
