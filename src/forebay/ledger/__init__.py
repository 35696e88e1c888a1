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

from forebay.ledger.chain import GENESIS, Checkpoint, Entry, canonical_json, read_entries
from forebay.ledger.coverage import count_coverage, coverage_root
from forebay.ledger.index import LedgerIndex, open_index
from forebay.ledger.job import MAX_SLICES, Job, decode_runs, encode_runs
from forebay.ledger.proof import ProofReport, check_proof, prove
from forebay.ledger.receipts import Used, receipt_message
from forebay.ledger.verify import MAX_PROBLEMS, LedgerReport, Replay, Verifier, verify_ledger
from forebay.ledger.writer import Ledger, Signer

__all__ = [
    "GENESIS", "MAX_PROBLEMS", "MAX_SLICES", "Checkpoint", "Entry", "Job", "Ledger", "LedgerIndex", "LedgerReport",
    "ProofReport", "Replay", "Signer", "Used", "Verifier", "canonical_json", "check_proof", "count_coverage",
    "coverage_root", "decode_runs", "encode_runs", "open_index", "prove", "read_entries", "receipt_message",
    "verify_ledger",
]  # fmt: skip
