"""Engines that keep running: `serve`, `launch`, `ps`, `stop`."""
