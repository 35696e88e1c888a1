"""Addresses on lists."""

import pytest

from forebay.errors import PrepareError, UsageError
from forebay.prepare.filters.url import Url
from support.batches import drop_reasons


def reasons(stage: Url, urls: list[str]) -> list[str]:
    return drop_reasons(stage, urls, url=urls)


def test_hosts_and_words(tmp_path):
    (tmp_path / "hosts").write_text("# bad ones\nbad.org\nEvil.example.  # too\n\n")
    (tmp_path / "words").write_text("casino\n")
    stage = Url(hosts=(str(tmp_path / "hosts"),), words=(str(tmp_path / "words"),))
    urls = {
        "https://bad.org/x": "url_host",
        "http://www.BAD.org:8080/": "url_host",
        "https://notbad.org/": "",
        "https://evil.example./": "url_host",
        "https://good.org/the-Casino_offers": "url_word",
        "https://good.org/casinos": "",
        "": "",
        "http://[broken": "",
        "https://" + "a." * 100_000 + "org": "",
    }
    assert reasons(stage, list(urls)) == list(urls.values())
    assert stage.files() == (str(tmp_path / "hosts"), str(tmp_path / "words"))


def test_words_that_come_with_it():
    urls = {
        "https://free-porn.example/": "url_word",
        "https://a.example/best-xxx_videos": "url_word",
        "https://freeporn.example": "url_substring",
        "http://www.x-videos.example/": "url_substring",
        "https://a.example/online-casino/poker": "url_soft_words",
        "https://a.example/casino/casino-royale": "",
        "https://a.example/sex-education/": "",
        "https://essex.gov.uk/scunthorpe/analysis": "",
        "https://en.wikipedia.org/wiki/Gay_and_lesbian_studies": "",
    }
    expected = list(urls.values())
    assert reasons(Url(), list(urls)) == expected
    assert reasons(Url(patterns=("^ftp:",)), list(urls)) == [""] * len(urls)
    assert reasons(Url(patterns=("^ftp:",), shipped=True), list(urls)) == expected


def test_lists_of_the_user(tmp_path):
    (tmp_path / "urls").write_text("https://www.a.org/x/\nb.org/y#z\n")
    stage = Url(urls=(str(tmp_path / "urls"),), patterns=(r"/\d{8,}$", "[?&]session="))
    urls_of = {
        "http://a.org/x": "url_address",
        "HTTPS://A.org/X/": "url_address",
        "http://a.org/x/y": "",
        "http://b.org/y#z": "url_address",
        "http://c.org/12345678": "url_pattern",
        "http://c.org/?Session=1": "url_pattern",
        "http://c.org/1234567": "",
    }
    assert reasons(stage, list(urls_of)) == list(urls_of.values())


def test_wrong_lists(tmp_path):
    with pytest.raises(UsageError, match="hosts: expected files"):
        Url(shipped=False)
    with pytest.raises(UsageError, match="patterns: expected an expression of re2, got '\\[a'"):
        Url(patterns=("[a",))
    with pytest.raises(PrepareError, match="none: expected a list"):
        reasons(Url(hosts=(str(tmp_path / "none"),)), ["https://a.b"])
