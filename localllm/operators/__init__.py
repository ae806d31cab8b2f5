"""This device's operators: which ones are used, whether they are right, and how they are tuned."""
