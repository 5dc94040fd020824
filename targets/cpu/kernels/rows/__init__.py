"""Kernels that pass over rows: norms, activations, transforms, quantized activations, experts."""
