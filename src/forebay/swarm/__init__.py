"""Peers that exchange slices: who fetches what from whom, and the processes that ask, serve and steer.

Without threads: `steering.py` (the choice), `members.py`, `reader_state.py`. With threads and sockets:
`tracker.py` and `share.py` (serving side), `reader.py` (reading side). Start at
`steering.py`. Imported by `load`, `mirror`, `data_node`, `scheduler`; imports `storage` and `network`.
"""
