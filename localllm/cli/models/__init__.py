"""The models on this machine: list, show, download, remove, plan, warm, open."""
