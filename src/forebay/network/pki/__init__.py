"""Keys, certificates and revocation of one network: root, organisations, nodes.

Start at `identity.py` (who this node is); `certificates.py` issues and verifies, `files.py` reads and writes a
network's directory, `revocation.py` has the CRLs. Opens no connection.
"""
