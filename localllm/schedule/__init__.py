"""What the next step computes: requests, blocks, prefixes, and the order of work. Without torch."""
