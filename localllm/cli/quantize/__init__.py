"""`localllm quantize`."""
