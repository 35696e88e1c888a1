"""`millrace.worker` under the name `core.dataset`."""
