"""Engines elsewhere: in another process, or behind HTTP."""
