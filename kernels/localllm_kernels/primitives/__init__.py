"""What kernels of several folders are made of: matrix units, shared memory, number formats."""
