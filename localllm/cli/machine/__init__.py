"""This machine and this user: settings, the shell, and `localllm doctor`."""
