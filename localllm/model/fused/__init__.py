"""Acceleration: all layers of a decoder in one call, where a library supports it."""
