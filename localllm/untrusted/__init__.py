"""Work whose cost strangers decide, in a process that can be killed."""
