"""Stages that drop documents, each in a module of its own. Most need numba, which compiles at the first use."""
