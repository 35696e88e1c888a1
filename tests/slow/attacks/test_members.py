"""Members see and do what their roles are for."""

from support.attacked import post_as
from support.attackers import ask, issue
from support.waiting import until


def test_figures_of_peers_are_for_administrators(node, network_dir):
    reader, admin = issue(network_dir, "reader", "worker"), issue(network_dir, "admin", "admin")
    sha256 = node.datasets[0].table.row(0).sha256
    assert ask(reader, node.address, "GET", f"/v1/slices/{sha256}")[0] == 200
    until(lambda: reader.peer_id.encode() in ask(admin, node.address, "GET", "/metrics")[1])
    status, text = ask(reader, node.address, "GET", "/metrics")
    assert status == 200 and b"forebay_connections" in text and reader.peer_id.encode() not in text


def test_the_role_and_the_settings_of_a_run(coordinator, network_dir, evil):
    """Members without the role are no workers, and none settles what all train on."""
    assert post_as(coordinator, issue(network_dir, "data", "data"), "join")[0] == 403
    settings = {"settings": {"dataset_name": "/etc", "num_steps": 1}}
    assert ask(evil, coordinator.address, "POST", "/v1/config", settings)[1]["config"] == {"batch_size": 2}
    for number in range(2):
        assert post_as(coordinator, evil, "join", worker_id=f"w{number}", session=f"session-{number}")[0] == 200
    status, message = post_as(coordinator, evil, "join", worker_id="w2", session="session-2")
    assert (status, message["error"]) == (429, "too_many_workers")
