"""`specpool bench serve`: drives an OpenAI server with a seeded trace, and measures it."""
