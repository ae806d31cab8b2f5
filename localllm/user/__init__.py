"""The user's settings, the places of files, and the kinds of caches."""
