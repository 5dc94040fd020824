"""Models by their names on the Hugging Face hub: found, fetched, listed, removed."""
