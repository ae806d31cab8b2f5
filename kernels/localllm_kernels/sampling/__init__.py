"""The next token: penalties, filters, and a keyed draw."""
