"""Forms of text: compile grammars, and say which tokens may follow."""
