"""What states and the layer that drafts cost and gain, on random weights in the shapes of Qwen3.5."""
