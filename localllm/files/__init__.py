"""Files that may be anybody's: read within bounds, written for their owner alone."""
