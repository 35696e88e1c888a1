"""Communication between processes: discovery, identities, HTTPS servers and clients, limits. No dataset logic.

Start at `pki/` (keys, certificates, revocation), `app.py` and `server.py` (serving), `client.py` (requests to peers)
and `discovery.py` (from a dataset's name to its providers). Imports nothing above `errors`, `files` and `units`.
"""
