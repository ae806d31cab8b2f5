"""Weights in fewer bits: a type each, and how files hold it."""
