"""Peers that exchange slices: who fetches what from whom, and the processes that ask, serve and steer.

Pure and without a clock: `steering.py` (the choice), `members.py`, `reader_state.py`. With sockets:
`tracker.py` and `share.py` (serving side), `tracker_client.py` and `reader.py` (reading side). Start at
`steering.py`. Imported by `load`, `mirror`, `data_node`, `scheduler`; imports `storage` and `network`.
"""
