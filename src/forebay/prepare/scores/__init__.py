"""Scores of documents: models and measures that become columns, and what is made of the columns."""
