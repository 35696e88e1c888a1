"""mbox: messages of every make, borders of parts, damage; written by the standard library's mailbox where it can."""

import gzip
import mailbox
from email.message import EmailMessage
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from forebay.formats.detect import detect
from forebay.formats.inputs import InputSplit, ReadOptions, local_file
from forebay.formats.mbox import Mbox
from forebay.formats.records import Record
from support.preparing import read_records


def message(text: str = "Hello.", **headers: str) -> EmailMessage:
    mail = EmailMessage()
    for name, value in headers.items():
        mail[name.replace("_", "-")] = value
    mail.set_content(text)
    return mail


def write(path: Path, *messages: EmailMessage | bytes) -> Path:
    box = mailbox.mbox(path)
    for mail in messages:
        box.add(mailbox.mboxMessage(mail))
    box.close()
    return path


def records(path: Path, **options: Any) -> list[Record]:
    assert detect(path).format == "mbox"
    return read_records(path, **options)


def raw(*bodies: bytes) -> bytes:
    return b"".join(b"From a@b Sat Jan  3 01:05:34 2004\n" + body + b"\n\n" for body in bodies)


def test_a_message_is_a_document_with_its_headers_as_columns(tmp_path):
    mail = message(
        "Grüße\nFrom here on 10:30:00 in 2004\n",
        Subject="Über alles", From="Ä <a@b.org>", Date="Mon, 5 Jan 2004 10:30:00 +0200",
        Message_ID="<1@b.org>", Archived_At="<https://list/1>", List_Id="a list",
    )  # fmt: skip
    path = write(tmp_path / "a.mbox", mail, message("Second."))
    columns = {"subject": "text", "from": "text", "date": "text", "list-id": "text", "absent": "text"}
    first, second = records(path, columns=columns)
    assert first.text == "Grüße\nFrom here on 10:30:00 in 2004"
    assert (first.id, first.url, first.location, first.start) == ("1@b.org", "https://list/1", "byte 0", 0)
    assert first.values == ("Über alles", "Ä <a@b.org>", "2004-01-05T08:30:00+00:00", "a list", "")
    assert (second.text, second.id, second.values) == ("Second.", "", ("", "", "", "", ""))
    packed = tmp_path / "b.mbox.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert [record.text for record in records(packed)] == [first.text, "Second."]


def test_the_plain_part_is_the_text_and_html_where_there_is_no_other(tmp_path):
    both = message("Plain.")
    both.add_alternative("<p>Html.</p>", subtype="html")
    both.add_attachment("An attached text.", filename="a.txt")
    both.add_attachment(message("A message in a message."))
    html = EmailMessage()
    html.set_content("<p>Only <b>html</b>.</p>", subtype="html")
    picture = EmailMessage()
    picture.set_content(b"\x89PNG", maintype="image", subtype="png")
    got = records(write(tmp_path / "a.mbox", both, html, picture))
    assert [(record.text.strip(), record.html, record.problem) for record in got] == [
        ("Plain.", False, ""),
        ("<p>Only <b>html</b>.</p>", True, ""),
        ("", False, ""),
    ]


def test_charsets_transfer_encodings_flowed_lines_and_quotes(tmp_path):
    path = tmp_path / "a.mbox"
    flowed = b"Content-Type: text/plain; charset=utf-8; format=flowed%b\n\n> quoted \n> on\nlong \nline\n-- \nme"
    path.write_bytes(
        raw(
            b"Content-Type: text/plain; charset=iso-8859-1\nContent-Transfer-Encoding: quoted-printable\n\nGr=FC=DFe",
            b"Content-Type: text/plain; charset=nonsense\n\nGr\xfc\xdfe aus K\xf6ln",
            b"Content-Type: text/plain; charset=utf-8\nContent-Transfer-Encoding: base64\n\nR3LDvMOfZQ==",
            flowed % b"",
            flowed % b"; delsp=yes",
            b"Subject: =?utf-8?q?=C3=9C?= =?broken?= x\n\n>From me\n>>From you",
        )
    )
    got = records(path, columns={"subject": "text"})
    assert [record.text for record in got] == [
        "Grüße",
        "Grüße aus Köln",
        "Grüße",
        "> quoted on\nlong line\n-- \nme",
        "> quotedon\nlongline\n-- \nme",
        "From me\n>From you",
    ]
    assert got[-1].values[0].startswith("Ü")


@given(
    texts=st.lists(st.text(st.sampled_from("ab \n>\r-"), max_size=40), min_size=1, max_size=6),
    newline=st.sampled_from([b"\n", b"\r\n"]),
    step=st.integers(1, 200),
)
def test_every_message_is_in_one_part_wherever_the_borders_are(tmp_path_factory, texts, newline, step):
    path = tmp_path_factory.getbasetemp() / "borders.mbox"
    data = raw(*(f"Message-ID: <{i}>\n\nx{text}".encode() for i, text in enumerate(texts)))
    path.write_bytes(data.replace(b"\r\n", b"\n").replace(b"\n", newline))
    file = local_file(path, path.name)
    size, options = path.stat().st_size, ReadOptions()
    full = list(Mbox().read_text(InputSplit((file,)), options))
    assert [record.id for record in full] == [str(i) for i in range(len(texts))]
    borders = [*range(0, size, step), size]
    parts = [InputSplit((file,), a, b, b - a) for a, b in pairwise(borders)]
    read = [record for part in parts for record in Mbox().read_text(part, options)]
    assert [(r.start, r.text) for r in read] == [(r.start, r.text) for r in full]
    again = list(Mbox().read_text(InputSplit((file,), full[-1].start, size), options))
    assert [(r.start, r.text) for r in again] == [(full[-1].start, full[-1].text)]


def test_damaged_messages_are_malformed_with_a_reason(tmp_path):
    path = tmp_path / "a.mbox"
    nested = b"".join(b"Content-Type: multipart/mixed; boundary=b%d\n\n--b%d\n" % (i, i) for i in range(2000))
    path.write_bytes(
        raw(
            b"\nNo headers at all.",
            b"Content-Type: multipart/mixed\n\nNo boundary.",
            b"Content-Transfer-Encoding: base64\nContent-Type: text/plain\n\nR3LDvMOfZ*",
            nested,
            b"Subject: large\n\n" + b"words \n" * 20_000,
            b"Subject: sound\n\nSound.",
        )
    )
    got = records(path, max_document_bytes=100_000)
    assert [record.problem.partition(":")[0] for record in got] == [
        "a message without headers",
        "multipart/mixed without its boundary",
        "text/plain in malformed base64",
        got[3].problem.partition(":")[0],
        "a message of 140018 bytes is longer than max_document_bytes, 100000",
        "",
    ]
    assert got[3].problem and got[-1].text == "Sound."
    packed = tmp_path / "b.mbox.gz"
    packed.write_bytes(gzip.compress(raw(b"A: b\n\nFirst.", b"A: b\n\nSecond." * 9000))[:-20])
    got = records(packed)
    assert [bool(record.problem) for record in got] == [False, True] and got[0].text == "First."
