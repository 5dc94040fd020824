"""A checkpoint as it is read: configuration, tensors, tokenizer, from a folder or the hub."""
