"""Ray over machines that share nothing but a bucket: the same dataset, also when machines are lost and added."""

import random
import time

from support import cluster
from support.calibration import scaled
from support.ray_nodes import HEAD, ray_nodes
from support.s3_server import S3Server


def test_machines_that_come_and_go_make_the_same_dataset(tmp_path):
    """Of three machines two are killed, one after the other, and others join."""
    directory = tmp_path / "s3"
    cluster.write_corpus(directory / "bucket/source", 90)
    local = cluster.start(str(directory / "bucket/source"), str(tmp_path / "local"), 1, {})
    expected = local.communicate()[0].split()[-1]
    with S3Server(directory, host="0.0.0.0") as server:
        environment = server.aws_environment() | {"AWS_ENDPOINT_URL": f"http://{HEAD}:{server.ports[0]}"}
        with ray_nodes(tmp_path, environment) as nodes:
            nodes.start_head()
            for _ in range(3):
                nodes.add()
            process = cluster.start("s3://bucket/source", "s3://bucket/out", 4, nodes.driver, engine="ray")
            out, rng, kills = directory / "bucket/out", random.Random(5), 0
            while kills < 2 and process.poll() is None:
                finished = len(list(out.glob(".work/done/*/*")))
                began = time.monotonic()
                while process.poll() is None and len(list(out.glob(".work/done/*/*"))) < finished + 4:
                    assert time.monotonic() < began + scaled(120), "the tasks do not go on"
                    time.sleep(0.05)
                nodes.kill(rng.randrange(1, len(nodes.nodes)))
                nodes.add()
                kills += 1
            output = process.communicate()[0]
        assert process.returncode == 0, output
        assert output.split()[-1] == expected and kills == 2
