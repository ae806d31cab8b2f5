"""GGUF files as checkpoints: their keys as a config.json, their tensors by the loader's names."""
