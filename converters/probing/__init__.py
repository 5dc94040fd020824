"""The codec of every part under a budget, from divergences that are measured part by part."""
