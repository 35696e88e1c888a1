"""`forebay.load.shards` under the name `tplr.sharded_dataset`."""
