"""What is drawn: streams, markdown, tables, help, and the status line."""
