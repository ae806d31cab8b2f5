"""When it is computed: requests, blocks, scheduling, sampling."""
