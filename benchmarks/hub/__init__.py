"""Streaming from the hub, beside Hugging Face `datasets` and beside what the dataset guide's first code did."""
