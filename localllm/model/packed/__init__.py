"""Quantized weights: one type per number format, and how files store it."""
