"""Calibration: text, the model one layer at a time in torch, and what is chosen by measurement."""
