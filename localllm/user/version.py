"""The version of localllm, for reports and for the keys of what is kept between runs."""

__version__ = "0.1.0"
