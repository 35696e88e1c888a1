"""`forebay.worker` under the names `worker.config` and `worker.client`."""
