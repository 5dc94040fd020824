"""One conversation: its tokens, its cache, and how both are saved."""
