"""What a user asks of an allocation, and the parts of a model that get a codec each."""
