"""The lease scheduler: which worker uses which samples of which dataset, recorded in ledgers.

Start at `core.py`: `SchedulerCore` is the pure state machine (no socket, no thread, no clock); `server.py` is the
FastAPI application around it, `journal.py` what survives a restart, `messages.py` the wire format. Imported by `worker`
(messages only), `simulate` and `cli`.
"""
