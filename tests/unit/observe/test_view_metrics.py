"""Metrics of views: a source that does not answer, workers of one name, rows and tokens."""

import json
from typing import Any

from forebay.network.app import exposition
from forebay.observe.metrics import view_metrics
from forebay.observe.views import make_view


def lines(**view: Any) -> list[str]:
    text = exposition(view_metrics({**make_view("job", "wiki", "running"), **view})).decode()
    return [line for line in text.splitlines() if not line.startswith("#") and "wait_ratio{cause" not in line]


def test_a_source_that_does_not_answer_has_no_stale_figures():
    figures = {"throughput": (5.0, "tokens/s"), "unheard of": (1, "")}
    assert lines(figures=figures) == ["forebay_dashboard_up 1.0", 'forebay_job_tokens_per_second{dataset="wiki"} 5.0']
    assert lines(figures=figures, error="it does not answer") == ["forebay_dashboard_up 0.0"]
    assert exposition(view_metrics(make_view("", "", "starting"))).endswith(b"\nforebay_dashboard_up 0.0\n")


def test_workers_of_one_name_stay_apart():
    workers = (
        '[{"name": "a", "id": "1", "leases": 1}, {"name": "a", "id": "2", "leases": 2}, {"name": "b", "leases": 3}]'
    )
    names = [line for line in lines(workers=json.loads(workers)) if line.startswith("forebay_worker_leases")]
    expected = [("a 1", 1), ("a 2", 2), ("b", 3)]
    assert names == [f'forebay_worker_leases{{worker="{name}"}} {count}.0' for name, count in expected]


def test_a_rate_is_of_tokens_or_of_rows():
    for unit in ("tokens", "samples"):
        row = {"name": "rank 0", "rate": 2.0, "step": None}
        shown = lines(kind="loader", figures={"throughput": (2.0, f"{unit}/s")}, workers=[row])
        assert shown == ["forebay_dashboard_up 1.0", f'forebay_worker_{unit}_per_second{{worker="rank 0"}} 2.0']


def test_all_causes_of_waiting_are_there():
    text = exposition(view_metrics(make_view("job", "wiki", "running", waits={"network": 0.25}))).decode()
    assert 'forebay_wait_ratio{cause="network",dataset="wiki"} 0.25' in text
    assert 'forebay_wait_ratio{cause="disk",dataset="wiki"} 0.0' in text
