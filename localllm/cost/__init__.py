"""What a model needs and how fast it can run, before it is downloaded."""
