"""The objects that a user holds: the engine, its sessions, outputs and statistics."""
