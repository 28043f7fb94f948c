"""`specpool serve`: an OpenAI-compatible server. It needs `specpool[serve]`."""
