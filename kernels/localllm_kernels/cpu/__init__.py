"""Operators in C for a processor, compiled on the machine they run on.

`build.py` compiles the sources once and keeps the library; `ops.py` and `linear.py` call it. They
compute in float32, with weights and keys and values in fewer bits, and a row has the same bits
whatever rows stand beside it. Each is held against the torch reference of the same name.
"""
