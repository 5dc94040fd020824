"""Small sound GGUF files as metadata and tensors, from which hostile ones are made."""
