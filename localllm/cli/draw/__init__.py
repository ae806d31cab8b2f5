"""What is drawn: streams, markdown, tables, and the status line."""
