"""Text: tokenizers, streams of text from tokens, stop strings and chat templates."""
