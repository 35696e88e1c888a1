"""Rules that say which documents are worth training on; each is a stage, in a module of its own.

Most need numba, which compiles a kernel at its first use and caches it.
"""
