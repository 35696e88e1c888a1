"""Files that run Forebay elsewhere: Slurm, Kubernetes, Docker Compose, systemd, from the templates beside this module.

Each setting has a pattern, so that no value changes the structure of a file. Texts without one, the command's words
above all, are quoted for the language that reads them: the filters `yaml`, `shell` and `unit`.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from forebay.errors import UsageError
from forebay.files import atomic_write

_COUNT = r"[1-9][0-9]{0,5}"
_COUNT_OR_ZERO = rf"0|{_COUNT}"
_IMAGE = r"[A-Za-z0-9][A-Za-z0-9_./:@-]*"
_LABEL = r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?"
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
_QUANTITY = r"[0-9]+(\.[0-9]+)?(m|[kMGTP]i?)?"
_SIZE = r"[0-9]+([kKMGT]i?B)?"
_TEXT = r".+"
_OPTIONAL = r".*"


@dataclass(frozen=True)
class Setting:
    """A setting of a kind of files: its default, what its value must match, and its description."""

    default: str
    pattern: str
    about: str


@dataclass(frozen=True)
class Kind:
    """A kind of files: its settings, what to do with the files, and whether they need a command."""

    settings: Mapping[str, Setting]
    next_steps: Sequence[str]
    needs_command: bool = False


_TRAIN = Setting("train", _LABEL, "name of the job and of its file")
_NETWORK_NAME = Setting("forebay", _LABEL, "name of the network")
_DATASET = Setting("wiki", _NAME, "name of the dataset, which is the name of the job")
_SEQ_LEN = Setting("1024", _COUNT, "tokens per sample")
_BATCH_SIZE = Setting("8", _COUNT, "samples per step of a worker")
_WORKERS = Setting("3", _COUNT, "workers")
_POD = {
    "gpus": Setting("0", _COUNT_OR_ZERO, "NVIDIA GPUs of a pod"),
    "cpu": Setting("8", _QUANTITY, "CPUs of a pod"),
    "memory": Setting("64Gi", _QUANTITY, "memory of a pod"),
}
_TRAINING_IMAGE = Setting("registry.example/train:1", _IMAGE, "image with Forebay and the command's program")

KINDS: dict[str, Kind] = {
    "slurm": Kind(
        {
            "name": _TRAIN,
            "nodes": Setting("1", _COUNT, "nodes"),
            "ranks_per_node": Setting("1", _COUNT, "ranks of a node"),
            "gpus_per_node": Setting("0", _COUNT_OR_ZERO, "GPUs of a node, all visible to each of its ranks"),
            "cpus_per_rank": Setting("8", _COUNT, "CPUs of a rank"),
            "memory": Setting("64G", r"[0-9]+[KMGT]?", "memory of a node; 0: all"),
            "time": Setting("24:00:00", r"[0-9]+(-[0-9]+)?(:[0-9]+){0,2}", "longest run"),
            "partition": Setting("", r"[A-Za-z0-9_.,-]*", "partition; empty: the cluster's default"),
            "account": Setting("", r"[A-Za-z0-9_.-]*", "account; empty: yours"),
            "cache": Setting("/tmp/forebay-cache", _TEXT, "directory on the node's own disk"),
        },
        ["sbatch {out}/{name}.sbatch"],
        needs_command=True,
    ),
    "kubernetes": Kind(
        {
            "name": _TRAIN,
            "image": _TRAINING_IMAGE,
            "pods": Setting("2", _COUNT, "pods"),
            "ranks_per_pod": Setting("1", _COUNT, "ranks of a pod; torchrun starts more than one"),
            **_POD,
        },
        ["kubectl apply -f {out}/{name}.yaml"],
        needs_command=True,
    ),
    "kubernetes-network": Kind(
        {
            "name": _NETWORK_NAME,
            "dataset": _DATASET,
            "claim": Setting("datasets", _LABEL, "PersistentVolumeClaim that has the dataset as a directory"),
            "image": _TRAINING_IMAGE,
            "data_nodes": Setting("1", _COUNT, "data nodes"),
            "workers": _WORKERS,
            "seq_len": _SEQ_LEN,
            "batch_size": _BATCH_SIZE,
            "cache_bytes": Setting("20GB", _SIZE, "cache of a worker"),
            "state": Setting("10Gi", _QUANTITY, "disk of the scheduler, for journal and ledger"),
            **_POD,
        },
        ["sh {out}/keys.sh", "kubectl apply -k {out}"],
    ),
    "compose": Kind(
        {
            "name": _NETWORK_NAME,
            "image": Setting("forebay", _IMAGE, "image with Forebay and the command's program"),
            "build": Setting("", _OPTIONAL, "directory with a Dockerfile for the image; empty: the image exists"),
            "data": Setting("./data", _TEXT, "directory with the dataset, as a directory of its name"),
            "dataset": _DATASET,
            "texts": Setting("./texts", _TEXT, "directory of texts to prepare, if the dataset does not exist"),
            "slice_bytes": Setting("64MiB", _SIZE, "size of a slice, if the dataset does not exist"),
            "workers": _WORKERS,
            "seq_len": _SEQ_LEN,
            "batch_size": _BATCH_SIZE,
            "port": Setting("7480", r"[1-9][0-9]{0,4}", "port of this machine for the dashboard"),
        },
        ["docker compose -f {out}/compose.yaml up"],
    ),
    "systemd": Kind(
        {
            "name": _NETWORK_NAME,
            "host": Setting("127.0.0.1", r"[A-Za-z0-9.-]+", "address of this machine that others reach"),
            "program": Setting("/opt/forebay/bin/forebay", r"/.+", "the installed command"),
            "dataset": _DATASET,
            "data": Setting("/srv/datasets", r"/.+", "directory with the dataset, as a directory of its name"),
            "seq_len": _SEQ_LEN,
        },
        [
            "useradd --system --home-dir /var/lib/forebay forebay",
            "sh {out}/keys.sh",
            "install -m 644 {out}/*.service /etc/systemd/system/",
            "systemctl enable --now {name}-dht {name}-data-node {name}-scheduler",
        ],
    ),
}


def render(kind: str, values: Mapping[str, str], command: Sequence[str]) -> dict[str, str]:
    """The files of a kind, text by name, filled in with these settings, else with defaults.

    Raises:
        UsageError: If a setting or its value is not valid, or the kind needs a command and there is none.
    """
    import jinja2

    settings = KINDS[kind].settings
    for key, value in values.items():
        if key not in settings:
            raise UsageError(f"launch {kind}: expected a setting of {', '.join(settings)}, got {key!r}.")
        setting = settings[key]
        if not re.fullmatch(setting.pattern, value) or not value.isprintable():
            form = "printable text" if setting.pattern in (_TEXT, _OPTIONAL) else setting.pattern
            raise UsageError(
                f"launch {kind}: {key} ({setting.about}): expected {form}, got {value!r:.100}. Correct it."
            )
    if KINDS[kind].needs_command and not command:
        raise UsageError(f"launch {kind}: expected a command, got none. Give one behind --, such as -- python train.py")
    if any(re.search("[\0\ud800-\udfff]", word) for word in command):
        raise UsageError(f"launch {kind}: expected a command of text, got a NUL byte or bytes that are not UTF-8.")
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"yaml": quote_yaml, "shell": shlex.quote, "unit": quote_unit}
    filled = {key: values.get(key, setting.default) for key, setting in settings.items()}
    templates = sorted((files("forebay.launch") / "templates" / kind).iterdir(), key=lambda file: file.name)
    texts = {}
    for template in templates:
        text = environment.from_string(template.read_text("utf-8")).render(filled, command=command)
        texts[template.name.replace("NAME", filled["name"])] = text
    return texts


def write(directory: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write files into a directory and return their paths; equal files are written again.

    Raises UsageError, before anything is written, if a file exists with another text.
    """
    paths = [directory / name for name in texts]
    for path, text in zip(paths, texts.values()):
        if path.exists() and path.read_text("utf-8", errors="replace") != text:
            raise UsageError(
                f"launch: expected no file {path}, got one with another text. Remove it, or give another directory."
            )
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in zip(paths, texts.values()):
        atomic_write(path, text.encode())
    return paths


def quote_yaml(text: str) -> str:
    """A double-quoted scalar of YAML; `$$` is a `$` both in Compose files and in a pod's command."""
    escaped = re.sub(r'["\\]', r"\\\g<0>", text.replace("$", "$$"))
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'


def quote_unit(text: str) -> str:
    """A word of a command in a systemd unit."""
    escaped = re.sub(r'["\\]', r"\\\g<0>", text.replace("%", "%%").replace("$", "$$"))
    return f'"{escaped}"'
