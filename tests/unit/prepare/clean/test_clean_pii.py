from pathlib import Path

import pytest

from forebay.prepare.clean.pii import Pii
from support.batches import stage_texts, to_batch

PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\nabc=\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("write to a.b+c@mail.example.co.uk.", "write to <email>."),
        ("<x_y@host.org>, 'z@host.org'", "<<email>>, '<email>'"),
        ("邮箱：foo@bar.com。", "邮箱：<email>。"),
        ("from 8.8.8.8:80 or 2a00:1450:4001:82a::200e/64", "from <ipv4>:80 or <ipv6>/64"),
        ("at 2a00:1450:4001:0:0:0:0:200e.", "at <ipv6>."),
        ("IBAN GB29 NWBK 6016 1331 9268 19 and de89370400440532013000", "IBAN <iban> and <iban>"),
        ("4111 1111 1111 1111 12/25", "<card> 12/25"),
        ("5555-5555-5555-4444, 378282246310005, 3782 822463 10005", "<card>, <card>, <card>"),
        ("+49 (0)89 123 4567, 0044 20 7946 0958", "<phone>, <phone>"),
        ("(555) 234-5678 x12, 555.234.5678, 1-555-234-5678 ext. 3", "<phone>, <phone>, <phone>"),
        ("01.84.17.61.18 / 07700 063 966", "<phone> / <phone>"),
        ("call 467 3395 or text", "call <phone> or text"),
        (
            "Contact Us\n© 2000-2018 X. Call 1914–1918, 1999/2001",
            "Contact Us\n© 2000-2018 X. Call 1914–1918, 1999/2001",
        ),
        ("Reach 10 000 000 people, call 612 345 678", "Reach 10 000 000 people, call <phone>"),
        ("Call 5551-2018 or 2018-5551", "Call <phone> or <phone>"),
        ("AKIAIOSFODNN7EXAMPLE", "<key>"),
        ("token ghp_" + "a1B2" * 9 + " end", "token <key> end"),
        ("xoxb-123456789012-abcdefGHIJ", "<key>"),
        ("AIza" + "Sy0-_" * 7, "<key>"),
        ("sk_live_" + "4eC39HqLyjWDarjt", "<key>"),
        ("sk-proj-" + "aB3dE5fG7hJ9kL1mN3pQ", "<key>"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N", "<key>"),
        (f"before\n{PEM}\nafter", "before\n<key>\nafter"),
        ('api_key = "a8F3kd92LLq0Zx7Yp1"', 'api_key = "<key>"'),
    ],
)
def test_masks(text, expected):
    assert stage_texts(Pii(), ["no data here", text]) == ["no data here", expected]


@pytest.mark.parametrize(
    "text",
    [
        "<phone> or 467 3395, <ipv4> app 1.2.3.4 <ipv4>, <passport> 12345678, <in_aadhaar> 2341 2341 2346",
        "@name, a@b, a@@b.com, user@host, @ 5pm, logo@2x.png, a.@b.c",
        "10.1.2.3, 127.0.0.1, 192.168.0.1, 172.20.1.1, 203.0.113.9, 224.0.0.1, 2001:db8::1, fe80::1, ::1",
        "1.2.3, 1.2.3.4.5, 256.1.1.1, v1.2.3.4, 12:34:56, std::vector, abc::def, 00:1A:2B:3C:4D:5E",
        "GB30 NWBK 6016 1331 9268 19, XX29NWBK60161331926819, GB29NWBK6016133192681",
        "4111 1111 1111 1112, 1234567890123456, 411111111111111",
        "2023-01-27 12:30, 27.01.2023, 1990-1995, 1,234,567,890, 3.14159265, 1 000 000, page 12345678",
        "ISBN 978-3-16-148410-0, 0.123456789, DOI 10.1000/182-44-1234, 2001 2002 2003, No. 123-45-6789-1",
        "Steuer 86095742718, AB1234567, 44051401359, 9434765919, 046454286, 000-12-3456, ABCDE1234FG, 2341 2341 2346",
        'sk-learn-is-a-library-for-machine, desk-top, secret = "aaaaaaaaaaaaaaaaaaaa", token: "your_token_goes_here"',
    ],
)
def test_leaves(text):
    assert stage_texts(Pii(), [text]) == [text]


@pytest.mark.parametrize("label", ["0", "1"])
def test_what_looks_like_personal_data_and_what_is(label):
    """`pii_texts.tsv`: whether anything is masked, what it is or looks like, and the text. All are ours."""
    lines = (Path(__file__).parent / "pii_texts.tsv").read_text("utf-8").splitlines()
    texts = [text for expected, _, text in (line.split("\t") for line in lines) if expected == label]
    wrong = [(a, b) for a, b in zip(texts, stage_texts(Pii(), texts)) if (a != b) != (label == "1")]
    assert len(texts) > 140 and not wrong


def test_options_and_counts():
    text = "a@b.com c@d.org 8.8.8.8 10.0.0.1"
    fine = Pii(kinds=("email", "ipv4"), style="fineweb")
    once = "email@example.com firstname.lastname@example.org 22.214.171.124 10.0.0.1"
    assert stage_texts(fine, [text, text, once]) == [once] * 3
    assert stage_texts(Pii(public_only=False), [text]) == ["<email> <email> <ipv4> <ipv4>"]
    verdict = Pii().apply(to_batch([text, ""]))
    assert verdict.counts == {"email": 2, "ipv4": 1} and verdict.drop.tolist() == [-1, -1]
