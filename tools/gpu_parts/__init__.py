"""The parts of `tools/gpu_suite.py`, by subject."""
