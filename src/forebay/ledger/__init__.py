"""The ledger: which worker used which samples at which step, in a chain that cannot be quietly changed.

A text file of JSON lines, hash-chained and signed: `chain` is its form, `writer` its writing, `receipts` what workers
sign, `verify` what it all proves, `proof` what a slice's part of it proves to others, `index` how it is asked. Only a
cut at the end of the file leaves a valid chain, and that shows as samples missing.

Kinds, with their bodies: `job` (always first: dataset, seed, seq_len, samples of each slice, the scheduler's key),
`worker` (peer id and public key, once each), `uses` (a worker's signed receipt for samples of slices, and
which session of it, where it runs several), `epoch` (its
end: samples and the Merkle root of its coverage), `set_aside` and `readmitted` (samples that failed on every worker),
`paused`, `resumed`, `weights`.

No network and no cryptography in here: what signs and what checks a signature is passed in.
"""
