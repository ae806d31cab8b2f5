"""Models by name: the catalogue, the hub, and what is on this machine."""
