"""A process that reads a Loader and writes a line for each batch: `forks.py` starts it, tests kill it.

The settings are JSON, so that tests and processes open the same Loaders; see `open_loader`.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from forebay import DocumentSubset, Loader, Mixture, NetworkOptions, OrderOptions, SampleOptions

_MEET_S = 0.002


def open_loader(spec: dict[str, Any], **more: Any) -> Loader[Any]:
    """`spec` has the Loader's arguments as JSON; `more` the arguments that are not."""
    arguments = {**spec, **more}
    if isinstance(arguments["dataset"], dict):
        arguments["dataset"] = Mixture(arguments["dataset"], [tuple(change) for change in arguments.pop("weights")])
    for name, kind in (("order", OrderOptions), ("network", NetworkOptions), ("samples", SampleOptions)):
        if isinstance(options := arguments.get(name), dict):
            if "documents" in options:
                options = {**options, "documents": DocumentSubset(**options["documents"])}
            if "worker_names" in options:
                options = {**options, "worker_names": tuple(options["worker_names"])}
            arguments[name] = kind(**options)
    return Loader(**arguments)


def describe(batch: Any, has_content: bool) -> dict[str, Any]:
    """A batch as JSON."""
    tensors = getattr(batch, "tensors", None)
    arrays = batch.arrays() if tensors is None else dict(sorted(tensors.items()))
    line = {
        "step": batch.step, "epoch": batch.epoch, "weight": batch.weight, "at": time.monotonic(),
        "ids": batch.sample_ids.tolist(), "sources": batch.dataset_index.tolist(),
        "rows": len(next(iter(arrays.values()))),
    }  # fmt: skip
    if has_content:
        names = arrays if tensors is not None else ["inputs", "labels", "document_ids", "position_ids"]
        values = [np.asarray(arrays[name]).tolist() for name in names if name in arrays]
        line["content"] = [list(row) for row in zip(*values)]
    return line


def digest_of(batch: Any, row: int) -> str:
    """A hash of a packed row: of its tokens, labels and documents."""
    digest = hashlib.sha256()
    for values in (batch.inputs, batch.labels, batch.document_ids, batch.position_ids):
        digest.update(np.ascontiguousarray(values[row], np.int64).tobytes())
    return digest.hexdigest()


def loss_of(batch: Any, row: int) -> float:
    """A number that stands for the loss of a row."""
    return float(batch.labels[row].clip(0).mean())


class Worker:
    """One process. Settings: `loader`, `pause_s`; optional `state`, `has_content`, `coordinator`, `name`, `shared`.

    With `gate` it starts to read when that file exists.

    With `has_losses` lines have the rows' digests and their mean loss, and at the end the providers that were rejected.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.pause_s = settings.get("pause_s", 0.0)

    def write(self, **line: Any) -> None:
        os.write(1, json.dumps(line).encode() + b"\n")  # One write: a kill tears no line.

    def run(self) -> None:
        with open_loader(self.settings["loader"]) as loader:
            if (state := self.settings.get("state")) is not None:
                loader.load_state_dict(state)
            self.write(ready=True, at=time.monotonic())
            while (gate := self.settings.get("gate")) is not None and not Path(gate).exists():
                time.sleep(_MEET_S)
            for batch in loader:
                line = describe(batch, self.settings.get("has_content", False))
                if self.settings.get("has_losses"):
                    rows = range(len(batch))
                    line["digests"] = [digest_of(batch, row) for row in rows]
                    line["loss"] = float(np.mean([loss_of(batch, row) for row in rows]))
                self.write(**line, state=loader.state_dict() if self.settings.get("has_state") else None)
                time.sleep(self.pause_s)
            sessions = loader.leases.sessions.open() if loader.leases else []
            loader.close()  # Only then is it known of the last batches whether their use is on record.
            rejected = [vars(report) for session in sessions for report in session.leases.state.counts.rejected]
            stats = {name: value for name, value in loader.stats().items() if isinstance(value, (int, float))}
            self.write(done=True, rejected=rejected, stats=stats)

    def run_coordinated(self) -> None:
        """Steps of all ranks together, in generations of a coordinator; files carry what ranks say to each other."""
        member = Member(self.settings["coordinator"], self.settings["name"])
        generation, step = member.join(), -1
        while True:
            if step < 0 or generation["start_step"] != step:
                step = generation["start_step"]
            ranks = Ranks(Path(self.settings["shared"]), generation)
            shares = {"rank": generation["rank"], "world_size": generation["world_size"]}
            with open_loader({**self.settings["loader"], **shares}) as loader:
                loader.load_state_dict(loader.state_at(step))
                step, outcome = self._read_together(loader, ranks, member, step)
            if outcome == "finished":
                return member.leave(step)
            generation = member.next_generation(step, is_broken=outcome == "broken")

    def _read_together(self, loader: Loader[Any], ranks: Ranks, member: Member, step: int) -> tuple[int, str]:
        for batch in loader:
            time.sleep(self.pause_s)
            results = ranks.gather(step, batch.sample_ids.tolist(), member)
            if results is None:
                return step, "broken"
            where = {"generation": ranks.number, "rank": ranks.rank, "of_ranks": [result["ids"] for result in results]}
            self.write(**where, **describe(batch, self.settings.get("has_content", False)))
            step += 1
            if any(result["is_changing"] for result in results):
                return step, "changing"
        return step, "finished"


class Ranks:
    """The ranks of a generation, which meet at each step: all have the step, or none has."""

    def __init__(self, directory: Path, generation: dict[str, Any]) -> None:
        self.number, self.rank, self.world_size = (generation[name] for name in ("number", "rank", "world_size"))
        self._directory = directory / str(self.number)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._put("pid", str(os.getpid()))

    def gather(self, step: int, ids: list[int], member: Member) -> list[dict[str, Any]] | None:
        """The results of all ranks in this step; None if one of them is gone without one."""
        self._put(f"{step}", json.dumps({"ids": ids, "is_changing": member.is_changing}))
        results = []
        for rank in range(self.world_size):
            while (text := self._get(f"{step}", rank)) is None:
                pid = self._get("pid", rank)
                is_gone = member.is_changing if pid is None else not Path(f"/proc/{pid}").exists()
                if is_gone and self._get(f"{step}", rank) is None:
                    return None
                time.sleep(_MEET_S)
            results.append(json.loads(text))
        return results

    def _put(self, name: str, text: str) -> None:
        path = self._directory / f"{name}-{self.rank}"
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)

    def _get(self, name: str, rank: int) -> str | None:
        try:
            return (self._directory / f"{name}-{rank}").read_text()
        except FileNotFoundError:
            return None


class Member:
    """A client of the coordinator's HTTP interface: one connection for requests, one that polls for changes."""

    def __init__(self, address: str, name: str) -> None:
        self._address, self._who = address, {"worker_id": name, "session": os.urandom(16).hex()}
        self._connections: dict[str, http.client.HTTPConnection] = {}
        self._generation: dict[str, Any] = {"number": 0}
        self.is_changing = False

    def join(self) -> dict[str, Any]:
        self._generation = self._until_generation("join", {"step": 0, "samples": 0})
        threading.Thread(target=self._poll, daemon=True).start()
        return self._generation

    def next_generation(self, step: int, is_broken: bool) -> dict[str, Any]:
        body = {"generation": self._generation["number"], "step": step, "broken": is_broken}
        self._generation = self._until_generation("ready", body)
        self.is_changing = False
        return self._generation

    def leave(self, step: int) -> None:
        self._ask("leave", {"generation": self._generation["number"], "step": step, "finished": True})

    def _until_generation(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        while "generation" not in (reply := self._ask(verb, {**body, "wait_s": 5.0})):
            assert "run_to" not in reply, reply
        generation: dict[str, Any] = reply["generation"]
        return generation

    def _poll(self) -> None:
        while True:
            number, known = self._generation["number"], self.is_changing
            body = {"generation": number, "step": 0, "changing": known, "broken": False, "wait_s": 2.0}
            changing = self._ask("heartbeat", body)["changing"]
            if number == self._generation["number"]:
                self.is_changing = changing

    def _ask(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        kind, give_up_at = "poll" if verb == "heartbeat" else "main", time.monotonic() + 60.0
        while True:
            connection = self._connections.setdefault(kind, http.client.HTTPConnection(self._address, timeout=60.0))
            text = json.dumps({**self._who, **body})
            try:
                connection.request("POST", f"/v1/members/{verb}", text, {"Content-Type": "application/json"})
                response = connection.getresponse()
                reply: dict[str, Any] = json.loads(response.read())
            except (OSError, http.client.HTTPException):
                del self._connections[kind]
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(0.05)  # The coordinator was killed, and comes back.
                continue
            refused = reply.get("error") if verb == "join" and time.monotonic() < give_up_at else None
            if refused == "expelled":
                continue  # This process was slower than the others may wait: it joins again.
            if refused in ("duplicate", "unsure"):
                time.sleep(0.05)  # The coordinator has not noticed yet that the process before this one was killed.
                continue
            assert response.status == 200, (verb, body, reply)
            return reply


def main(text: str) -> None:
    worker = Worker(json.loads(text))
    if "coordinator" in worker.settings:
        worker.run_coordinated()
        os._exit(0)  # The thread that polls is left as it is.
    worker.run()
