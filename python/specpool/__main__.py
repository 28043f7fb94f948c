"""`python -m specpool`: the same as the `specpool` command."""

from specpool.cli import main

main()
