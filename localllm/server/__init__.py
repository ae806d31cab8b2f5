"""The HTTP server: a front end with OpenAI's API, and an engine in a process of its own."""
