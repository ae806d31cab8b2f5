"""The supported families, one file each: from config.json to the layers of a model."""
