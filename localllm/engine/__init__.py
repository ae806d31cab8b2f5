"""The engine decides when tokens are computed: requests, blocks, scheduling, sampling."""
