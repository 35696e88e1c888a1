"""The one way to bytes: local paths, HTTP, buckets, the Hugging Face hub, and the schemes that other packages register.

Start at `base.py` (the `Origin` protocol and its errors), `origins.py` (`open_origin`, the list of URL schemes) and
`retry.py` (when a request is sent again). Imports `dataset`, and nothing of the network of peers.
"""
