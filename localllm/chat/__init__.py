"""Conversations, and their storage."""
