"""The files of `forebay launch`, run as processes of this machine: no engine, cluster or init system is needed."""

import contextlib
import json
import re
import socket
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from forebay.cli import main
from support.containers import Container, Machine, image, without_dollars

STATUS = ["forebay", "status", "--json", "--timeout", "20"]
PROGRAM = """
import json, sys, forebay
with forebay.Loader() as loader:
    print("rows", sum(len(batch.sample_ids) for batch in loader), sys.argv[1:])
"""
RESTRICTED = """
import ctypes, errno, os, platform, socket, struct, sys

SOCKET_CALL = {"x86_64": 41, "aarch64": 198}[platform.machine()]
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EAFNOSUPPORT
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2  # of prctl

families = [getattr(socket, name) for name in sys.argv[1].split()]
rules = [(LOAD, 0, 0, 0), (JUMP_IF_EQUAL, 0, len(families) + 2, SOCKET_CALL), (LOAD, 0, 0, 16)]
rules += [(JUMP_IF_EQUAL, len(families) - index, 0, family) for index, family in enumerate(families)]
rules += [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
head = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(program))
prctl = ctypes.CDLL(None).prctl
assert prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == prctl(SECCOMP, FILTER, head, 0, 0) == 0
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Run a command that may open sockets of some families only, as `RestrictAddressFamilies` of systemd does (seccomp)."""


@pytest.fixture
def machine(tmp_path) -> Iterator[Machine]:
    with contextlib.closing(Machine(tmp_path / "machine")) as result:
        yield result


def write_texts(directory: Path):
    directory.mkdir()
    for i in range(40):
        (directory / f"{i}.txt").write_text(f"Text {i} of the mill race that turns the wheel. " * 60)


def rows(workers: list[Container]) -> int:
    """The rows that programs of workers counted; each must have ended with 0, and with its own words."""
    total = 0
    for worker in workers:
        assert worker.wait() == 0, worker.log.read_text()
        (line,) = re.findall(r"^rows (\d+) (.*)$", worker.log.read_text(), re.MULTILINE)
        assert line[1] == str(["two words", "$HOME"])
        total += int(line[0])
    return total


def test_a_compose_file_trains_to_the_end(tmp_path, machine):
    """Services start in the order of their conditions; the image's health check decides which are healthy."""
    write_texts(tmp_path / "texts")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "data").mkdir()
    words = f"launch compose {tmp_path}/out --set=dataset=mill --set=slice_bytes=4KiB --set=seq_len=16".split()
    words += f"--set=texts={tmp_path}/texts --set=data={tmp_path}/data -- python {tmp_path}/program.py".split()
    assert not main([*words, "two words", "$HOME"])
    file = without_dollars(yaml.safe_load((tmp_path / "out" / "compose.yaml").read_text()))
    entrypoint, probe = image()
    services, containers = file["services"], {}
    assert len(services) == 8  # setup, a network of six, and the dashboard
    assert {volume["source"] for service in services.values() for volume in service.get("volumes", ())
            if volume["type"] == "volume"} == set(file["volumes"])  # fmt: skip

    def start(name):
        service = services[name]
        mounts = {
            volume["target"]: Path(volume["source"]) if volume["type"] == "bind" else machine.volume(volume["source"])
            for volume in service.get("volumes", ())
        }
        command = [*service.get("entrypoint", entrypoint), *service["command"]]
        return machine.start(name, command, service.get("environment", {}), mounts, list(services))

    waiting = list(services)
    while waiting:
        name = next(name for name in waiting if not set(services[name].get("depends_on", ())) & set(waiting))
        for other, condition in services[name].get("depends_on", {}).items():
            if condition["condition"] == "service_completed_successfully":
                assert containers[other].wait() == 0, containers[other].log.read_text()
            else:
                assert condition["condition"] == "service_healthy"
                containers[other].wait_until(probe)
        waiting.remove(name)
        containers[name] = start(name)
    used = rows([container for name, container in containers.items() if name.startswith("worker-")])
    status = containers["scheduler"].run(*STATUS)
    assert json.loads(status.stdout)["done"] and json.loads(status.stdout)["num_samples"] == used
    ledger = machine.volume("state") / "ledger.jsonl"
    verified = containers["scheduler"].run("forebay", "ledger", "verify", str(ledger))
    assert verified.returncode == 0, verified.stderr
    (published,) = services["dashboard"]["ports"]
    assert published.startswith("127.0.0.1:") and published.endswith(":7480")
    url, shown = f"http://127.0.0.1:{machine.port('dashboard', '7480')}/", b""
    while not shown:  # Nobody waited for it to be up.
        assert containers["dashboard"].popen.poll() is None, containers["dashboard"].log.read_text()
        with contextlib.suppress(OSError), urllib.request.urlopen(url) as page:
            shown = page.read()
    assert b"<html" in shown
    assert not list(machine.volume("worker-1").glob("root-key.pem"))
    again = start("setup")  # `up` once more: keys and dataset stay
    assert again.wait() == 0 and "ready" not in again.log.read_text()
    containers["data-node"].stop()
    assert containers["data-node"].run(*probe).returncode == 1


def documents(directory: Path) -> list[dict]:
    """Return what `kubectl apply -k` creates: the resources, then the Secrets, whose files are named by their keys."""
    kustomization = yaml.safe_load((directory / "kustomization.yaml").read_text())
    result = list(yaml.safe_load_all((directory / "network.yaml").read_text()))
    for secret in kustomization["secretGenerator"]:
        named = dict(item.split("=") if "=" in item else (Path(item).name, item) for item in secret["files"])
        data = {key: (directory / path).read_text() for key, path in named.items()}
        result.append({"kind": "Secret", "metadata": {"name": secret["name"]}, "data": data})
    return result


class Cluster:
    """Pods of Deployments, StatefulSets and Jobs; services of one pod each."""

    def __init__(self, machine: Machine, resources: list[dict], datasets: Path):
        self.machine, self.resources, self.datasets = machine, resources, datasets
        self.secrets = {r["metadata"]["name"]: r["data"] for r in resources if r["kind"] == "Secret"}
        self.services = [r["metadata"]["name"] for r in resources if r["kind"] == "Service"]

    def start(self, name: str, index: int = 0) -> tuple[Container, dict]:
        """Start a pod, after its init containers; the container, and its description."""
        (resource,) = [r for r in self.resources if r["metadata"]["name"] == name and "template" in r["spec"]]
        pod, pod_name = resource["spec"]["template"]["spec"], f"{name}-{index}"
        volumes = {claim["metadata"]["name"]: self.machine.volume(f"{name} {claim['metadata']['name']}")
                   for claim in resource["spec"].get("volumeClaimTemplates", ())}  # fmt: skip
        for volume in pod.get("volumes", ()):
            directory = self.machine.volume(f"{pod_name} {volume['name']}")
            if "secret" in volume:
                for key, text in self.secrets[volume["secret"]["secretName"]].items():
                    (directory / key).write_text(text)
            elif "persistentVolumeClaim" in volume:
                directory = self.datasets
            volumes[volume["name"]] = directory
        for container in pod.get("initContainers", ()):
            started = self._run(pod_name, container, volumes)
            assert started.wait() == 0, started.log.read_text()
        (container,) = pod["containers"]
        return self._run(pod_name, container, volumes), container

    def _run(self, pod, container, volumes):
        # A pod's address is its service's, if there is one, as each service has one pod here.
        service = pod.rpartition("-")[0]
        own = service if service in self.services else pod
        values = {}
        for entry in container.get("env", ()):
            field = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            values[entry["name"]] = {"status.podIP": own, "metadata.name": pod, None: entry.get("value")}[field]

        def expand(text):
            return re.sub(r"\$(\$|\((\w+)\))", lambda m: "$" if m[1] == "$" else values[m[2]], text)

        values = {key: expand(value) for key, value in values.items()}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container.get("volumeMounts", ())}
        command = [expand(word) for word in container["command"]]
        return self.machine.start(pod, command, values, mounts, [*self.services, own])


def test_a_network_on_kubernetes_trains_to_the_end(tmp_path, machine):
    """Keys by keys.sh, identities by tokens, probes, three pods of the workers' Job."""
    write_texts(tmp_path / "texts")
    (tmp_path / "program.py").write_text(PROGRAM)
    datasets, out = tmp_path / "datasets", tmp_path / "out"
    words = f"prepare {tmp_path}/texts --out {datasets}/mill --tokenizer bytes --slice-bytes 4KiB -q".split()
    assert not main(words)
    words = f"launch kubernetes-network {out} --set=name=lab --set=dataset=mill --set=seq_len=16 --set=image=a".split()
    assert not main([*words, "--", "python", str(tmp_path / "program.py"), "two words", "$HOME"])
    keys = out / "keys.sh"
    for service, port in (("lab-dht", "7400"), ("lab-admit", "7443")):
        text = keys.read_text().replace(f"{service}:{port}", f"127.0.0.1:{machine.port(service, port)}")
        assert text != keys.read_text()
        keys.write_text(text)
    creating = machine.start("keys", ["sh", str(keys)], {}, {})
    assert creating.wait() == 0, creating.log.read_text()
    assert {oct(path.stat().st_mode & 0o77) for path in out.glob("*.token")} == {"0o0"}
    cluster = Cluster(machine, documents(out), datasets)
    admit, described = cluster.start("lab-admit")
    assert described["readinessProbe"]["tcpSocket"]["port"] == 7443
    while admit.popen.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", machine.port("lab-admit", "7443"))):
            break
    scheduler = None
    for name in ("lab-dht", "lab-data-node", "lab-scheduler"):
        scheduler, described = cluster.start(name)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            scheduler.wait_until(described[probe]["exec"]["command"])
    shown = cluster.start("lab-dashboard")[0]
    used = rows([cluster.start("lab-worker", index)[0] for index in range(3)])
    page = f"http://127.0.0.1:{machine.port('lab-dashboard-0', '7480')}"
    shown.wait_until(["forebay", "top", page, "--json"])
    assert json.loads(shown.run("forebay", "top", page, "--json").stdout)["workers"]
    status = json.loads(scheduler.run(*STATUS).stdout)
    assert status["done"] and status["num_samples"] == used
    # The scheduler's pod starts again: its key, and the job, are on its disk.
    scheduler.stop()
    assert scheduler.run(*described["readinessProbe"]["exec"]["command"]).returncode == 1
    restarted, _ = cluster.start("lab-scheduler")
    restarted.wait_until(described["readinessProbe"]["exec"]["command"])
    assert json.loads(restarted.run(*STATUS).stdout)["peer_id"] == status["peer_id"]


def test_units_start_what_keys_were_created_for(tmp_path, machine):
    """The units' commands with systemd's notification socket: each sends READY=1 when `forebay status` exits 0."""
    write_texts(tmp_path / "texts")
    data, out, state = tmp_path / "sets 100%", tmp_path / "out", tmp_path / "state"
    assert not main(["prepare", str(tmp_path / "texts"), "--out", str(data / "mill"), "--tokenizer", "bytes", "-q"])
    program = machine.programs / "forebay"
    words = f"launch systemd {out} --set=dataset=mill --set=host=127.0.0.1 --set=program={program}".split()
    assert not main([*words, f"--set=data={data}", "--set=seq_len=16"])
    keys = out / "keys.sh"
    ports = {port: str(machine.port("node", port)) for port in ("7400", "7410", "7420")}

    def local(text):
        for port, free in ports.items():
            text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{free}")
        return text.replace("/var/lib/forebay", str(state))

    keys.write_text(local(keys.read_text()))
    for name in ("keys", "keys again"):
        creating = machine.start(name, ["sh", str(keys)], {}, {})
        assert creating.wait() == 0, creating.log.read_text()
    for name, address in (("dht", "udp://127.0.0.1:7400"), ("data-node", "127.0.0.1:7410"),
                          ("scheduler", "127.0.0.1:7420")):  # fmt: skip
        unit = (out / f"forebay-{name}.service").read_text()
        ((line, families),) = re.findall(r"^ExecStart=(.*)\n(?:.*\n)*RestrictAddressFamilies=(.*)$", unit, re.MULTILINE)
        words = [a or b for a, b in re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', line)]
        command = [sys.executable, "-c", RESTRICTED, families]
        command += [local(re.sub(r"\\(.)|%(%)|\$(\$)", r"\1\2\3", word)) for word in words]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
            notified.bind(str(tmp_path / f"{name}.sock"))
            notified.settimeout(600)
            environment = {"NOTIFY_SOCKET": str(tmp_path / f"{name}.sock"), "FOREBAY_STATUS": local(address),
                           "FOREBAY_IDENTITY": str(state / "data-node")}  # fmt: skip
            node = machine.start(name, command, environment, {})
            assert notified.recv(100) == b"READY=1", node.log.read_text()
        assert node.run(*STATUS).returncode == 0
