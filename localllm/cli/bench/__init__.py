"""`localllm bench` and `localllm eval`."""
