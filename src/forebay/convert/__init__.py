"""Datasets from one format to another: counted, verified, bounded in memory."""
