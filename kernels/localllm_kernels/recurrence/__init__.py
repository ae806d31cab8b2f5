"""Recurrences and short convolutions, and the states that they keep."""
