"""Bytes on disk: `forebay.storage.atomic` is the one way to write a file that must survive a crash.

Imported by every package above it; imports none of them.
"""
