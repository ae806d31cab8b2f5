"""Conversations, and where they are saved."""
