"""Our own processes: the memory they take, the messages they send, the way they end."""
