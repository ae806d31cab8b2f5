"""Processes of our own: what they take, how they speak, how they end."""
