"""Raw input of any kind to records: files, URLs, archives and dumps."""
