"""Tokenizers and chat templates of strangers' files, and how models mark thinking and calls of tools."""
