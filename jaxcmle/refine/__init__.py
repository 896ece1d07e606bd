"""A better model from a model."""
