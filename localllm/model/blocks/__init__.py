"""The blocks that layers are made of: each tells what it needs, and computes itself."""
