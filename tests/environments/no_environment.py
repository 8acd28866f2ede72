"""A package that is no environment."""
