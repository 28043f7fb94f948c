"""What a checkpoint folder holds, read without torch or transformers where that suffices."""
