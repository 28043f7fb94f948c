"""From tokens to text, and from chats to tokens."""
