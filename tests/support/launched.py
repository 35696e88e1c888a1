"""Hostile words for files that `forebay launch` writes, and the parsed manifest of an indexed job."""

import yaml

from forebay.launch import render

HOSTILE = [
    "two words", "$HOME", "$(id)", "`id`", "';id;'", '"; id #', "a: b", "{{ name }}", "%h\\n", "é\t\n- x", "\x9b",
]  # fmt: skip


def manifest(settings: dict[str, str], command: list[str]) -> tuple[dict, dict]:
    """Return an indexed Job and its container, after the checks that hold for all."""
    (text,) = render("kubernetes", {"image": "train:1"} | settings, command).values()
    service, indexed = yaml.safe_load_all(text)
    spec = indexed["spec"]
    assert (service["kind"], indexed["kind"], spec["completionMode"]) == ("Service", "Job", "Indexed")
    assert spec["completions"] == spec["parallelism"] == int(settings.get("pods", 2))
    pod = spec["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": indexed["metadata"]["name"]}
    assert service["metadata"]["name"] == pod["subdomain"] and service["spec"]["clusterIP"] == "None"
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == container["resources"]["requests"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert all(isinstance(entry["value"], str) for entry in container["env"])
    return indexed, container
