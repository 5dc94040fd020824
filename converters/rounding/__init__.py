"""Weights of one matrix rounded: presets, GPTQ's columns, tuning, and how a linear layer is stored."""
