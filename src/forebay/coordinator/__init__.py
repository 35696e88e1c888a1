"""The coordinator: ranks and world size of a synchronous training run, also while workers join and leave.

Start at `membership.py`, a pure function from (state, event) to (state, actions); `server.py` is the FastAPI
application around it, `store.py` its SQLite file, `messages.py` the types of both. Imported by `worker` (messages
only), `observe` and `cli`.
"""
