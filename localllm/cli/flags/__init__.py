"""Flags that several commands share, how flags are defined, and what `--help` and Tab show."""
