"""Engines in another process, or on an HTTP server."""
