"""Proofs that a slice was used in an epoch, verifiable without the ledger.

A proof has the leaf of the slice and its path to the root, and as evidence lines of the ledger: the job, the
epoch's entry with its root, and the entries whose receipts used the slice. Each line is signed by the scheduler, each
receipt by its worker.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.errors import ForebayError, LedgerError, UsageError
from forebay.ledger.chain import Link, read_link
from forebay.ledger.coverage import Ranges, cover, merkle_path, merkle_root, root_of_path
from forebay.ledger.index import LedgerIndex
from forebay.ledger.job import Job
from forebay.ledger.verify import LedgerReading, Verifier, coverage_of, read_entry

FORMAT = "forebay coverage proof 2"


def prove(index: LedgerIndex, epoch: int, slice_index: int) -> dict[str, Any]:
    """The proof of a slice, as JSON."""
    job, uses = index.job, index.uses
    if not 0 <= slice_index < len(job.samples) or epoch < 0:
        raise UsageError(f"prove: expected epoch >= 0 and a slice of {len(job.samples)}, got {epoch}, {slice_index}.")
    if not (uses["epoch"] == epoch).any():
        raise LedgerError(f"ledger {index.path}: nothing of epoch {epoch}.")
    dataset = job.dataset_of(slice_index)
    first = job.bounds[dataset]
    coverage = coverage_of(job, uses, index.aside, dataset, epoch)
    leaves = coverage.leaves(job.job_id, epoch, first)
    ended = [
        entry.seq
        for entry in index.others
        if entry.kind == "epoch" and (entry.body.get("dataset", 0), entry.body["epoch"]) == (dataset, epoch)
    ]
    used = np.unique(uses["seq"][(uses["epoch"] == epoch) & (uses["slice"] == slice_index)]).tolist()
    asides = [e.seq for e in index.others if e.kind == "set_aside" and e.body.get("slice") == slice_index]
    by = set(uses["worker"][np.isin(uses["seq"], used)].tolist())
    peer_ids = {index.workers[number] for number in by}
    workers = [e.seq for e in index.others if e.kind == "worker" and e.body.get("worker") in peer_ids]
    lines = index.lines([0, *ended, *workers, *used, *asides])
    return {
        "format": FORMAT,
        "epoch": epoch,
        "slice": slice_index,
        "leaf": leaves[slice_index - first].decode(),
        "index": slice_index - first,
        "size": len(leaves),
        "path": [node.hex() for node in merkle_path(leaves, slice_index - first)],
        "root": merkle_root(leaves).hex(),
        "lines": [[seq, lines[seq].decode()] for seq in sorted(lines)],
    }


@dataclass(frozen=True)
class ProofReport:
    """Result of `check_proof`. `recorded`: the scheduler signed this root. `used`: the samples, by the receipts."""

    ok: bool
    problems: list[str]
    epoch: int
    slice: int
    root: str
    recorded: bool
    used: list[list[int]]
    workers: list[str]

    def to_json(self) -> dict[str, Any]:
        """The output of `forebay ledger verify --proof --json`."""
        return dict(vars(self))


def check_proof(proof: Any, verify: Verifier, *, key: bytes | None = None, root: str | None = None) -> ProofReport:
    """Check that the leaf leads to the root, and that the evidence is signed and agrees with the leaf.

    Args:
        key: The scheduler's public key; by default that of the proof's own job entry, which proves less.
        root: A root from another source, in hex.
    """
    try:
        epoch, slice_index = int(proof["epoch"]), int(proof["slice"])
        leaf, path = str(proof["leaf"]).encode(), [bytes.fromhex(node) for node in proof["path"]]
        size, leaf_index, claimed = int(proof["size"]), int(proof["index"]), str(proof["root"])
        links = [read_link(line.encode(), int(seq), None, "proof") for seq, line in proof["lines"]]
        if proof["format"] != FORMAT or not links:
            raise ValueError(f"format {proof['format']}")
        job = Job.of(links[0].entry("proof"))
        first, last = job.bounds[job.dataset_of(slice_index) :][:2]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise LedgerError(f"proof: expected one of `forebay ledger export --proof`, got {error!r}.") from None
    problems: list[str] = []
    computed = root_of_path(leaf, leaf_index, size, path)
    if computed is None or computed.hex() != claimed or (root is not None and root != claimed):
        problems.append(f"the leaf does not lead to the root {root or claimed}")
    if (leaf_index, size) != (slice_index - first, last - first):
        problems.append(
            f"the leaf is {leaf_index} of {size}, slice {slice_index} would be {slice_index - first} of {last - first}"
        )
    used, aside, workers, recorded = _evidence(links, job, key or job.scheduler, verify, epoch, slice_index, problems)
    if recorded is not None and recorded != claimed:
        problems.append(f"the epoch's entry has root {recorded}, the proof {claimed}")
    expected_leaf = _leaf_of(job, epoch, slice_index, used, aside)
    if expected_leaf != leaf:
        problems.append(f"the leaf says {leaf.decode()!r}, the receipts {expected_leaf.decode()!r}")
    ranges = [list(part) for part in used]
    return ProofReport(
        not problems, problems, epoch, slice_index, claimed, recorded == claimed, ranges, sorted(workers)
    )


def _leaf_of(job: Job, epoch: int, slice_index: int, used: Ranges, aside: Ranges) -> bytes:
    samples = job.samples[slice_index : slice_index + 1]
    table = np.array(used, np.int64).reshape(-1, 2)
    gone = [(0, start, stop) for start, stop in aside]
    coverage = cover(samples, np.zeros(len(table), np.int64), table[:, 0], table[:, 1], gone)
    return coverage.leaf(job.job_id, epoch, 0, slice_index)


def _evidence(
    links: list[Link], job: Job, key: bytes, verify: Verifier, epoch: int, slice_index: int, problems: list[str]
) -> tuple[Ranges, Ranges, set[str], str | None]:
    """The slice by the lines: ranges used, ranges set aside, the workers, and the epoch's root."""
    reading = LedgerReading(verify, is_part=True, problems=problems)
    for link in links:
        try:
            verify(key, link.signed, bytes.fromhex(link.sig))
            read_entry(link.entry("proof"), reading)
        except (ForebayError, ValueError) as error:
            problems.append(f"entry {link.seq} ({link.kind}): {error}")
    table, names = reading.uses.table(), list(reading.uses.workers)
    mine = table[(table["epoch"] == epoch) & (table["slice"] == slice_index)]
    used = list(zip(mine["start"].tolist(), mine["stop"].tolist()))
    aside = [(start, stop) for _, start, stop in reading.aside_of.get((epoch, slice_index), ())]
    _, root = reading.roots.get((job.dataset_of(slice_index), epoch), (0, None))
    return used, aside, {names[number] for number in mine["worker"].tolist()}, None if root is None else str(root)
