"""Products with weights, whatever their number format."""
