"""Mixtures of experts: the choice of experts, and their products."""
