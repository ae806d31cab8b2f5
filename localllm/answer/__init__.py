"""A loaded model that answers in text."""
