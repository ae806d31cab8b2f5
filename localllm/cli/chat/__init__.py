"""`localllm chat`: a question, a conversation, or many lines; and saved conversations."""
