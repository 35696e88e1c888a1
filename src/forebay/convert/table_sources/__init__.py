"""Readers of tables, one file a family of formats: each gives a Table, which reads from the start as often as asked."""
