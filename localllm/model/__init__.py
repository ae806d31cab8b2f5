"""The model's computation: decoder, weights, inputs."""
