"""What is computed: decoder, weights, inputs."""
