"""The text of a prompt: standard input, files, folders, and lines one by one."""
