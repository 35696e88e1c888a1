"""One record of the records of several processes that work on one preparation, and what it costs.

Each member of a job array writes a record of its own, of the tasks that it ran. Together they say how far the run is:
what was finished when the first of them began, and what their tasks did. Moments are of the clocks of several machines.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from forebay.errors import UsageError
from forebay.files import HOST, is_running
from forebay.prepare.executions import find_stragglers, merged_steps
from forebay.storage.store import Store

SILENT_S = 60.0  # A process that has not written its record for so long is named.
MAX_LISTED = 20
PRICE_VARIABLE = "FOREBAY_PRICE_PER_CORE_HOUR"
Record = Mapping[str, Any]


def read_all(store: Store, prefix: str) -> dict[str, bytes]:
    """The small objects whose names begin with a prefix, by name; without those that are removed meanwhile."""

    def read(name: str) -> bytes | None:
        with suppress(FileNotFoundError):
            return store.read(name)
        return None

    names = list(store.sizes(prefix))
    return {name: data for name, data in zip(names, store.each(read, names)) if data is not None}


def price_per_core_hour() -> float | None:
    """The price that the environment names. UsageError if it is no number."""
    text = os.environ.get(PRICE_VARIABLE, "")
    try:
        price = float(text) if text else None
    except ValueError:
        price = -1.0
    if price is not None and not 0 <= price < math.inf:
        raise UsageError(f"{PRICE_VARIABLE}: expected a price such as 0.04, got {text!r}.")
    return price


def cost_of(record: Record) -> dict[str, float | None]:
    """What the processes cost so far, a core each, and what they will have cost when the stage ends."""
    price = record["price_per_core_hour"]
    if price is None:
        return {"cost": None, "cost_at_stage_end": None}
    stage = next((stage for stage in record["stages"] if stage["stopped_at"] is None), None)
    remaining_s = stage and stage["remaining_s"]
    cost = price * record["worker_s"] / 3600
    at_end = None if remaining_s is None else cost + price * record["num_workers"] * remaining_s / 3600
    return {"cost": round(cost, 4), "cost_at_stage_end": at_end and round(at_end, 4)}


def state_of(record: Record) -> str:
    """What a process does by its record: `running`, `silent`, `lost`, or how it ended."""
    if record["state"] != "running":
        return str(record["state"])
    if record["host"] == HOST and not is_running(record["pid"]):
        return "lost"
    return "silent" if time.time() - record["updated_at"] > SILENT_S else "running"


def merge(records: Sequence[Record]) -> dict[str, Any]:
    """The record of the run, of the records of its processes."""
    if len(records) == 1 and not records[0]["member"]:
        record = dict(records[0])
        if state_of(record) == "lost":
            error = "the process is gone: killed, or out of memory"
            record |= {"state": "interrupted", "error": error, "workers": [], "stragglers": []}
        return record
    records = sorted(records, key=lambda record: record["member"].zfill(8))
    members = [_member(record) for record in records]
    state, error = _state(members)
    running = [
        record for record, member in zip(records, members) if member["state"] == "running" and state == "running"
    ]  # fmt: skip
    first = next((record for record in running if not record["member"]), (running or records)[0])
    counted = [record for record in records if record["counts_all"]] or records
    if counted is not records:  # A member that counts all tasks has the results of the others.
        counted = [max(counted, key=lambda record: record["updated_at"])]
    steps = merged_steps(entry for record in records for entry in record["steps"])
    workers = [worker for record in running for worker in record["workers"]]
    rejects = {entry["where"]: entry for record in records for entry in record["rejects"]}
    merged = {
        **first, "state": state, "error": error, "member": "", "members": members,
        "started_at": min(record["started_at"] for record in records),
        "updated_at": max(record["updated_at"] for record in records),
        "wall_s": max(record["wall_s"] for record in records),
        "num_workers": sum(record["num_workers"] for record in running or records),
        "workers": workers, "stragglers": find_stragglers(workers, steps),
        "stages": _stages(records, running), "steps": [times.to_json() for times in steps.values()],
        "funnel": _funnel(counted), "counts_all": counted[0]["counts_all"],
        **{name: sum(r[name] for r in counted) for name in ("documents_in", "documents_out", "malformed")},
        "samples": _samples(records), "rejects": [*rejects.values()][:MAX_LISTED],
        "messages": _latest(records, "messages", "at"), "retries": _latest(records, "retries", "failed_at"),
        "lost_machines": list(dict.fromkeys(name for record in records for name in record["lost_machines"])),
        "cpu_s": _sums(record["cpu_s"] for record in records),
        "peak_bytes": max(record["peak_bytes"] for record in records),
        "worker_s": round(sum(record["worker_s"] for record in records), 3),
    }  # fmt: skip
    prices = [record["price_per_core_hour"] for record in records if record["price_per_core_hour"] is not None]
    merged |= {"price_per_core_hour": prices[0] if prices else None}
    return {**merged, **cost_of(merged)}


def _member(record: Record) -> dict[str, Any]:
    return {
        "member": record["member"] or "finish", "state": state_of(record), "host": record["host"], "pid": record["pid"],
        "tasks": sum(step["tasks"] for step in record["steps"]), "running": len(record["workers"]),
        "task": record["workers"][0]["task"] if record["workers"] else "", "num_workers": record["num_workers"],
        "updated_at": record["updated_at"], "last_report_s": round(max(0.0, time.time() - record["updated_at"]), 1),
        "cpu_s": round(sum(record["cpu_s"].values()), 3), "error": record["error"],
    }  # fmt: skip


def _state(members: Sequence[Record]) -> tuple[str, str]:
    """The state of the run, and why it is not running."""
    by_state = {member["state"]: member for member in reversed(members)}
    for state in ("done", "running"):
        if state in by_state:
            return state, ""
    if failed := by_state.get("failed"):
        return "failed", f"job {failed['member']} ({failed['host']}): {failed['error']}"
    if ended := by_state.get("ended"):
        return "ended", ended["error"]
    gone = [member for member in members if member["state"] in ("silent", "lost")]
    return "interrupted", f"{len(gone)} of {len(members)} processes are gone, the others were stopped"


def _stages(records: Sequence[Record], running: Sequence[Record]) -> list[dict[str, Any]]:
    by_name: dict[str, list[tuple[Record, dict[str, Any]]]] = {}
    for record in records:
        for stage in record["stages"]:
            by_name.setdefault(stage["stage"], []).append((record, stage))
    stages = [_stage(entries, running) for entries in by_name.values()]
    return sorted(stages, key=lambda stage: stage["started_at"])


def _stage(entries: Sequence[tuple[Record, dict[str, Any]]], running: Sequence[Record]) -> dict[str, Any]:
    """One stage over all processes: what was done before the first, and by each of them."""
    stages = [stage for _, stage in entries]
    now = [stage for record, stage in entries if stage["stopped_at"] is None and record in running]
    total = max(stage["total"] for stage in stages)
    before, own = ([stage[name] for stage in stages] for name in ("before", "own"))
    done, documents_in, documents_out = (
        max(*(stage[name] for stage in stages), min(b[i] for b in before) + sum(o[i] for o in own))
        for i, name in enumerate(("done", "documents_in", "documents_out"))
    )
    done = min(done, total)
    # What each process does in a second, which its own remaining time says.
    rate = sum((stage["total"] - stage["done"]) / stage["remaining_s"] for stage in now if stage["remaining_s"])
    stops = [stage["stopped_at"] for stage in stages if stage["stopped_at"] is not None]
    stops += [record["updated_at"] for record, stage in entries if stage["stopped_at"] is None]
    return {
        **(now or stages)[0], "done": done, "total": total, "documents_in": documents_in,
        "documents_out": documents_out, "started_at": min(stage["started_at"] for stage in stages),
        "stopped_at": None if now else max(stops), "cpu_s": round(sum(stage["cpu_s"] for stage in stages), 3),
        **{name: _sum(stage[name] for stage in now) for name in ("documents_per_s", "bytes_per_s")},
        "remaining_s": round((total - done) / rate, 3) if rate else None,
    }  # fmt: skip


def _sum(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) if numbers else None


def _sums(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for entry in counts:
        total.update(entry)
    return {name: round(value, 3) for name, value in total.items()}


def _funnel(records: Sequence[Record]) -> list[dict[str, Any]]:
    by_stage: dict[str, list[Record]] = {}
    for record in records:
        for entry in record["funnel"]:
            by_stage.setdefault(entry["stage"], []).append(entry)
    return [
        {
            "stage": stage, **{name: sum(e[name] for e in entries) for name in ("documents_in", "documents_out")},
            **{name: _sums(e[name] for e in entries) for name in ("dropped", "changed")},
        }
        for stage, entries in by_stage.items()
    ]  # fmt: skip


def _samples(records: Sequence[Record]) -> list[dict[str, str]]:
    samples: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for record in records:
        for sample in record["samples"]:
            samples.setdefault((sample["stage"], sample["reason"]), {})[sample["where"]] = sample
    return [sample for group in samples.values() for sample in list(group.values())[:3]]


def _latest(records: Sequence[Record], name: str, moment: str) -> list[Any]:
    return sorted((entry for record in records for entry in record[name]), key=lambda e: e[moment])[-MAX_LISTED:]
