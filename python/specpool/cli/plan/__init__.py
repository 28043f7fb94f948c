"""`specpool plan`: what fits into so much memory."""
