"""Containers as processes of this machine: commands, environment, mounts and probes as a file for containers has them.

A mount is a symbolic link in the container's own directory, an address of a service a free port of 127.0.0.1,
and `forebay` runs this interpreter. `chown` does nothing. All else is as in the file.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.ports import free_port
from support.runner import ROOT, make_commands
from support.waiting import until


class Machine:
    """Runs containers until `close`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.programs = directory / "bin"
        directory.mkdir()
        make_commands(self.programs)
        (self.programs / "chown").symlink_to("/bin/true")
        self._ports = {}
        self._volumes = {}
        self._containers = []

    def port(self, service: str, port: str) -> int:
        """A free port for a port of a service, below those that the kernel gives to a process that asks for any."""
        name = f"{service}:{port}"
        while name not in self._ports:
            if (number := free_port()) not in self._ports.values():
                self._ports[name] = number
        return self._ports[name]

    def volume(self, name: str) -> Path:
        """A directory of this name."""
        if name not in self._volumes:
            self._volumes[name] = self.directory / "volumes" / re.sub(r"\W", "_", name)
            self._volumes[name].mkdir(parents=True)
        return self._volumes[name]

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str], mounts: Mapping[str, Path],
              services: Sequence[str] = ()) -> Container:  # fmt: skip
        """Start a container; `services` are names beside its own whose addresses it uses."""

        root = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.directory))
        for target, source in mounts.items():
            (root / target[1:]).parent.mkdir(parents=True, exist_ok=True)
            (root / target[1:]).symlink_to(source)

        def local(text):
            for top in {target.split("/")[1] for target in mounts}:
                text = re.sub(rf"(?<![\w/.-])/{re.escape(top)}(?![\w.-])", str(root / top), text)
            own = ("0.0.0.0", "127.0.0.1")
            names = "|".join(map(re.escape, (*services, *own)))

            def address(match):
                service = name if match[1] in own else match[1]
                return f"127.0.0.1:{self.port(service, match[2])}"

            return re.sub(rf"(?<![\w.-])({names}):(\d{{4}})(?!\d)", address, text)

        values = {key: local(value) for key, value in environment.items()}
        container = Container(self, name, [local(word) for word in command], values)
        self._containers.append(container)
        return container

    def close(self) -> None:
        for container in self._containers:
            container.stop()


class Container:
    """A process in a directory of its own."""

    def __init__(self, machine: Machine, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self.directory = machine.directory / name
        self.directory.mkdir(exist_ok=True)
        self.log = self.directory / "log"
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("FOREBAY_")},
            "PATH": f"{machine.programs}:{os.environ['PATH']}", **environment,
        }  # fmt: skip
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                command, cwd=self.directory, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command beside it, as `exec` of Docker and Kubernetes."""
        return subprocess.run(command, cwd=self.directory, env=self.environment, capture_output=True, text=True)

    def wait(self) -> int:
        return self.popen.wait()

    def wait_until(self, probe: Sequence[str]) -> None:
        """Wait until the probe says that it is healthy."""
        until(lambda: self.popen.poll() is not None or self.run(*probe).returncode == 0)
        assert self.popen.poll() is None, self.log.read_text()

    def stop(self) -> int:
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGTERM)
        return self.popen.wait()


def image() -> tuple[list[str], list[str]]:
    """The entry point of the image that Dockerfile makes, and the command of its health check."""
    text = (ROOT / "Dockerfile").read_text()
    (entrypoint,) = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    (probe,) = re.findall(r"^HEALTHCHECK [^\[]*CMD (\[.*\])$", text, re.MULTILINE)
    return json.loads(entrypoint), json.loads(probe)


def without_dollars(value: Any) -> Any:
    """A value of a Compose file after interpolation, which has `$$` as `$`."""
    if isinstance(value, str):
        assert not re.search(r"(?<!\$)(\$\$)*\$(?!\$)", value), value  # no variable of the shell that runs compose
        return value.replace("$$", "$")
    if isinstance(value, dict):
        return {without_dollars(key): without_dollars(item) for key, item in value.items()}
    return [without_dollars(item) for item in value] if isinstance(value, list) else value
