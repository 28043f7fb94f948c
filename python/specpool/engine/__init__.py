"""What a user holds: the engine, its sessions, outputs and statistics."""
