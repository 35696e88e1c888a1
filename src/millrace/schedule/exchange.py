"""`POST /v1/exchange`: what a worker says and is answered, as JSON; checked strictly, so that garbage ends here.

    {"job": NAME or "", "session": hex, "address": "host:port" or "",
     "held": [lease ids that it knows of],
     "job_id": "…", "uses": [{"lease_id", "epoch", "slice", "start", "stop", "step"}], "signature": hex,
     "horizons": {lease_id: sample}, "release": [ids], "failed": [{"lease_id", "reason"}], "want": 0…16,
     "have": {dataset_id: "0-15,17"}, "bad": [{"peer_id", "sha256", "reason"}], "speed": samples a second}

    {"uses": [{"lease_id", "offset", "stop"}], "refused": [{"lease_id", "code", "message", "offset"}],
     "live": {lease_id: {"stop", "expires_in_s"}}, "lost": [ids],
     "leases": [{"lease_id", "job", "job_id", "epoch", "slice", "index", "dataset_id", "name", "sha256", "bytes",
                 "count", "start", "stop", "sample_base", "seed", "seq_len", "layout", "dtype", "vocab_size",
                 "providers": [{"peer_id", "address", "is_origin"}], "expires_in_s"}],
     "wait_s", "done", "paused", "tell_have"}

Every field of the question may be left out. What its sender has to know:

- One exchange at a time a session. It is idempotent: if the answer was lost, ask again with what is true then.
- `uses` are of one job: `job_id` says which, and `signature` is over `receipt_message(job_id, uses)`. Uses of two
  jobs go in two exchanges. `epoch` and `slice` repeat the lease's. A use begins where the last one recorded ended.
- `refused`: code `lost`: the lease is gone, drop it; code `range`: go on from `offset`; what lies before it is on
  record. `offset` in `uses` is where the record stands now.
- `horizons`: the worker uses no sample from there on before it hears an answer to this exchange; it does not raise
  the horizon while an exchange is unanswered, though it may have been lost. A lease without one is not cut.
- `live` has each lease held that is not lost: its `stop` may have moved to the horizon. A lease whose stop is
  reached is over, at once if nothing of it was begun; forget it. A cut is told again for as long as it is `held`.
- `held` is what it knows of before this answer; what the scheduler gave it beyond that never arrived, and is
  taken back. An empty list gives all back. Left out: nothing is taken back.
- `have`: `index` of the slices cached, ranges with both ends in; a dataset left out is unchanged since the last time.
  `tell_have` asks for all of it.
- `slice` counts over all datasets of the job, `index` within its dataset. `sample_base` + sample is the global id.
"""
