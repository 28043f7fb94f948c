"""The two ends between the front (asyncio) and the engine, which runs in a process of its own."""
