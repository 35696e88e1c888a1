"""Readers of tables, one file a family of formats: each gives a table, which reads from the start as often as asked."""
