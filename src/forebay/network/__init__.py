"""Communication between processes: discovery, identities, HTTPS servers and clients, limits. and datasets of peers.

Start at `pki/` (keys, certificates, revocation), `app.py` and `server.py` (serving), `client.py` (requests to peers)
`discovery.py` (from a dataset's name to its providers) and `peer_dataset.py` (a dataset of `forebay://`).
"""

import logging

log = logging.getLogger("forebay.network")
