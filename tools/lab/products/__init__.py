"""Single products of weights and few or many rows on a GPU, beside those of others."""
