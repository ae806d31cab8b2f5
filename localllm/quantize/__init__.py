"""How checkpoints in fewer bits are made."""
