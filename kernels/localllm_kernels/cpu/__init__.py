"""Operators in C for the CPU, compiled on the machine they run on.

`build.py` compiles the sources once and keeps the library; `ops.py` and `linear.py` call it. The
operators compute in float32, with weights, keys and values in fewer bits, and a row has the same
bits whatever other rows are in the batch. Each is tested against the torch reference of its name.
"""
