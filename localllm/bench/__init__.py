"""How fast a model runs here, and how far that is from what the hardware could do."""
