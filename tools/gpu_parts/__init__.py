"""What `tools/gpu_suite.py` runs, by what is to be found out."""
