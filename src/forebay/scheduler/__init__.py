"""The lease scheduler: assigns samples of datasets to workers and records their use in ledgers.

Start at `core.py`: `SchedulerCore` is the pure state machine (no socket, thread or clock). `server.py` is the FastAPI
application around it, `journal.py` its persistence, `messages.py` the wire format. Imported by `worker` (messages
only), `simulate` and `cli`.
"""
