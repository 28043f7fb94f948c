"""The parts of `specpool plan`: how many requests fit into a given memory."""
