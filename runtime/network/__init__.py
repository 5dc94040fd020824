"""The forward pass as a list of operations: decoder, vision tower, adapters, pooling."""
