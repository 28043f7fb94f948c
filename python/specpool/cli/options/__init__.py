"""The options of the commands: declared once, named as typed, checked before any heavy import."""
