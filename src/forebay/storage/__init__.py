"""The one way to bytes: local paths, HTTP, buckets, the Hugging Face hub, and peers by name.

Start at `base.py` (the `Origin` protocol and its errors) and `origins.py` (`open_origin`, the list of URL schemes).
`fetch.py` fetches runs of chunks from several sources at once and verifies them, `transfers.py` whole slices and other
objects by such runs. Imported by `cache`, `swarm`, `formats` and all above; imports only `dataset` and `network`.
"""
