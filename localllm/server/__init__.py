"""The HTTP server: a front that speaks OpenAI's API, and an engine in a process of its own."""
