"""Reads files that may come from anyone, within bounds; writes files for the user alone."""
