"""Work on untrusted input, in processes that can be killed."""
