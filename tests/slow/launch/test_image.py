"""The image, built by buildah, and the whole pipeline in it: no engine is needed, but root and the base image are."""

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from support.paths import ROOT

ENVIRONMENT = {**os.environ, "BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": os.environ.get("STORAGE_DRIVER", "vfs")}
NAME = "localhost/forebay-test"


def buildah(*words: object) -> str:
    done = subprocess.run(["buildah", *map(str, words)], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def container() -> Iterator[str]:
    if shutil.which("buildah") is None:
        pytest.skip("buildah is not installed")
    if not buildah("images", "--quiet", "--filter", "reference=python:3.13-slim-bookworm").strip():
        pytest.skip("there is no base image: buildah pull docker.io/library/python:3.13-slim-bookworm")
    buildah("bud", "--pull-never", "--format", "docker", "--tag", NAME, ROOT)
    name = buildah("from", "--pull-never", NAME).strip()
    yield name
    buildah("rm", name)
    buildah("rmi", NAME)


def test_workers_use_every_sample_in_the_image(container):
    assert "demo: ok" in buildah("run", "--user", "10001:10001", container, "--", "forebay", "demo")
