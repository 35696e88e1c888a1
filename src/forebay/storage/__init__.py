"""The one way to bytes: local paths, HTTP, buckets, the Hugging Face hub, and peers by name.

Start at `base.py` (the `Origin` protocol and its errors) and `origins.py` (`open_origin`, the list of URL schemes).
`transfers.py` fetches slices from several origins at once into part files and verifies them. Imported by `cache`,
`swarm`, `formats` and all above; imports only `dataset` and `network`.
"""
