"""Datasets in formats of others, opened in place."""
