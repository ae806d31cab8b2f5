"""What is the user's: settings, places of files, kinds of caches."""
