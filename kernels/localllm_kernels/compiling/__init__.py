"""How kernels are compiled, chosen, launched and counted."""
