"""Other programs that use a model here: agents and editors, and the server that they ask."""
