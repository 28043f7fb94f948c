"""OpenAI's requests and answers: what comes in, what it means to the engine, what goes out."""
