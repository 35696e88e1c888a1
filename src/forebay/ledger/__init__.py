"""The ledger: which worker used which samples at which step, in a hash chain that shows every change.

A text file of JSON lines, hash-chained and signed. Start at `chain.py` (the format, and what workers sign);
`writer.py` appends, `verify.py` checks a whole ledger, `index.py` reads it for queries. Only a cut at the end of the
file leaves a valid chain; it shows as missing samples.

Kinds, with their bodies: `job` (always first: dataset, seed, seq_len, samples of each slice, the scheduler's key),
`worker` (peer id, certificate and name; again once that certificate has ended), `uses` (a worker's signed receipt for
samples of slices, with its session if it runs several), `epoch` (the end of one), `set_aside` and `readmitted` (samples
that failed on every worker), `paused`, `resumed`.

No network and no cryptography here: callers pass in the functions that sign, and that verify signatures and
certificates. Imported by `scheduler`, `worker`, `observe` and `cli`.
"""
