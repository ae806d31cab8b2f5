"""Attention over the paged cache, and what writes keys and values to it."""
