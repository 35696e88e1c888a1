"""Hostile pages cost linear time: CPU seconds of this process, with a margin of eight for noise and caches."""

import time

import pytest

from forebay.prepare.extract import extract_html
from support.hostile_pages import HOSTILE


def cpu_s(html: str) -> float:
    start = time.process_time()
    extract_html(html)
    return time.process_time() - start


@pytest.mark.parametrize("html", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_pages_cost_linear_time(html: str):
    extract_html("<p>compiled")
    quarter = cpu_s(html[: len(html) // 4])
    assert cpu_s(html) < 8 * quarter + 0.5
