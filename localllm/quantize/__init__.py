"""Quantization: making checkpoints with fewer bits per weight."""
