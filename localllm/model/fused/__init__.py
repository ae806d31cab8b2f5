"""Accelerations: all layers of a decoder in one call, where a library has that for them."""
