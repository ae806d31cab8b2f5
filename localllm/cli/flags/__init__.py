"""Flags that several commands share, and how flags are defined."""
