"""Inputs that are not files on this machine: URLs, the hub, JSON APIs."""
