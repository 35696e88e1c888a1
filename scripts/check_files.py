"""Check files that other programs read: one line per fault, exit status 1 if there is one.

Usage: python scripts/check_files.py

- Workflows run targets of Makefile, with as few rights as that needs, and no text of a commit is part of a script.
- The Dockerfile copies what .dockerignore lets through, and its user is not root; compose.yaml is what `launch` writes.
- Scripts and jobs of docs/how-to/cluster.md are well-formed.
- Panels and alerts ask for metrics and labels that docs/reference/metrics.md has.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from forebay.launch import render

ROOT = Path(__file__).resolve().parents[1]
COMPOSE = {"build": ".", "dataset": "code", "texts": "./src/forebay/formats", "slice_bytes": "8KiB", "seq_len": "64"}
METRIC = r"\b(?:forebay|process)_\w+"


def read(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


def read_blocks(path: str, language: str) -> list[str]:
    """Return the fenced blocks of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", read(path), re.MULTILINE | re.DOTALL)


def check_workflows() -> Iterator[str]:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        workflow = yaml.safe_load(path.read_text())
        if workflow["permissions"] != {"contents": "read"}:
            yield f"{path}: expected the permission to read contents alone, got {workflow['permissions']}"
        scripts = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
        invoked = [word for script in scripts for word in re.findall(r"\bmake ([a-z-]+)", script)]
        if path.stem not in invoked or not set(invoked) <= targets:
            yield f"{path}: expected steps that run `make {path.stem}`, and targets of Makefile, got {invoked}"
        yield from (f"{path}: expected values by the environment, got {text!r}" for text in scripts if "${{" in text)


def check_images() -> Iterator[str]:
    text = read("Dockerfile")
    if re.findall("^USER (.*)$", text, re.MULTILINE) != ["10001:10001"]:
        yield "Dockerfile: expected the user 10001:10001"
    copied = {word for line in re.findall("^COPY (?!--from)(.*)$", text, re.MULTILINE) for word in line.split()[:-1]}
    ignored = read(".dockerignore").split("\n")
    for word in sorted(copied - {line[1:] for line in ignored if line.startswith("!")}):
        yield f".dockerignore: leaves out {word}, which Dockerfile copies"
    if ignored[1] != "*":
        yield f".dockerignore: expected * first, got {ignored[1]!r}"
    if read("compose.yaml") != render("compose", COMPOSE, [])["compose.yaml"]:
        yield f"compose.yaml: expected what `forebay launch compose` writes with {COMPOSE}"


def check_cluster_page() -> Iterator[str]:
    page = "docs/how-to/cluster.md"
    scripts = [script for script in read_blocks(page, "text") if script.startswith("#!")]
    if [script.count("#SBATCH") > 0 for script in scripts] != [True, True]:
        yield f"{page}: expected two Slurm scripts, got {len(scripts)} scripts"
    for script in scripts:
        checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        if checked.returncode:
            yield f"{page}: bash does not read a script: {checked.stderr}"
    (job,) = map(yaml.safe_load, read_blocks(page, "yaml"))
    if (job["apiVersion"], job["kind"]) != ("ray.io/v1", "RayJob"):
        yield f"{page}: expected a RayJob of ray.io/v1"
    cluster = job["spec"]["rayClusterSpec"]
    for pod in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        containers = pod["template"]["spec"]["containers"]
        if [source["secretRef"]["name"] for item in containers for source in item["envFrom"]] != ["bucket-credentials"]:
            yield f"{page}: expected the secret bucket-credentials in each pod of the RayJob"
        yield from (
            f"{page}: {name}: expected a string, got {value!r}"
            for name, value in pod["rayStartParams"].items()
            if not isinstance(value, str)
        )


def check_metrics() -> Iterator[str]:
    rows = re.findall(r"^\|`(\w+)`\|\w+\|([^|]*)\|", read("docs/reference/metrics.md"), re.MULTILINE)
    labels_of = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}
    (rules,) = [
        text for text in read_blocks("docs/how-to/metrics.md", "yaml") if text.startswith("# forebay-rules.yml")
    ]
    queries = [(rule["alert"], rule["expr"], "") for rule in yaml.safe_load(rules)["groups"][0]["rules"]]
    for panel in json.loads(read("examples/grafana/forebay.json"))["panels"]:
        queries += [(panel["title"], item["expr"], item["legendFormat"]) for item in panel.get("targets", ())]
    for title, query, legend in queries:
        names, shown = set(re.findall(METRIC, query)), set(re.findall(r"{{(\w+)}}", legend))
        grouped = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", query))))
        if not names or not names <= labels_of.keys():
            yield f"{title}: expected documented metrics, got {sorted(names - labels_of.keys()) or query}"
            continue
        exist = {"instance", "job"}.union(*(labels_of[name] for name in names))
        for label in sorted((grouped | shown | set(re.findall(r"(\w+)=~", query))) - exist):
            yield f"{title}: {label} is no label of {sorted(names)}"
        if grouped and not shown <= grouped:
            yield f"{title}: the legend {legend} has a label by which {query} is not grouped"


def main() -> int:
    checks = (check_workflows, check_images, check_cluster_page, check_metrics)
    faults = [fault for check in checks for fault in check()]
    print("\n".join(faults) or "files: workflows, images, the cluster's page and metrics checked")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
