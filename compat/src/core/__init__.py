"""`forebay.worker` under the name `core.dataset`."""
