"""What training-data files are, what is wrong with them, and what mends it."""
