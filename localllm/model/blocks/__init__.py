"""The blocks that layers are made of: what each needs, and how it computes."""
