"""Drafts: who proposes tokens, how many, and whether that pays."""
