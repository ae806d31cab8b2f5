"""The supported families, a file each: from config.json to the layers of a model."""
