"""What comes out of the readers of text is what is in the file: nothing lost, falsified or misread."""

import bz2
import gzip
import io
import json
import lzma
import re
import tarfile
import zlib
from decimal import Decimal
from typing import Any

import brotli
import google_crc32c
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from forebay.formats.tfrecord import masked
from support.archives import tar_bytes
from support.preparing import prepare, read_records, write_jsonl

MAIL = "From a@b Sat Jan  3 01:05:34 2004\n"
WIKI = "<mediawiki><siteinfo/>%s</mediawiki>"
PAGE = "<page><title>T</title><ns>0</ns><id>1</id><revision>%s<text>%s</text></revision></page>"


def table(*groups: list, kind: Any = None) -> bytes:
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, pa.schema([("text", kind or pa.string())])) as writer:
        for group in groups:
            writer.write_table(pa.table({"text": pa.array(group, kind or pa.string())}))
    return sink.getvalue()


def stream(*texts: str) -> bytes:
    sink, batch = pa.BufferOutputStream(), pa.record_batch({"text": texts})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def warc(*blocks: str | bytes, head: str = "WARC-Type: response") -> bytes:
    packed = [block.encode() if isinstance(block, str) else block for block in blocks]
    records = (b"WARC/1.0\r\n%s\r\nContent-Length: %d\r\n\r\n%s\r\n\r\n" % (head.encode(), len(b), b) for b in packed)
    return b"".join(records)


def page(body: bytes, headers: str = "X: y") -> bytes:
    return warc(f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n{headers}\r\n\r\n".encode() + body)


def tar(kind: bytes, data: bytes = b"") -> bytes:
    file, info = io.BytesIO(), tarfile.TarInfo("a.txt")
    info.type, info.size = kind, len(data)
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


B = b"\xef\xbb\xbf"
LINE = b'{"text":"a"}\n'
GZ = gzip.compress(b"<p>a")
SZ = b"\xff\x06\0\0sNaPpY\1\x11\0\0" + masked(google_crc32c.value(LINE)).to_bytes(4, "little") + LINE
DICTIONARY = zstandard.train_dictionary(1024, [LINE + b"%d" % (i * i) for i in range(999)])
DICTED = zstandard.ZstdCompressor(dict_data=DICTIONARY).compress(LINE)

CASES = {
    # Ordinary absences.
    "a.parquet": (table([], ["a"], [], ["b", None], []), "a|b|~"),
    "no-groups.parquet": (table(), ""),
    "null.parquet": (table([None, None], kind=pa.null()), "~|~"),
    **dict.fromkeys(
        ["zero.parquet", "zero.arrow", "zero.jsonl", "zero.warc", "zero.mbox", "zero-articles.xml"], ("", "")),
    "zero.tar": (bytes(10240), ""),
    "null.jsonl": ('{"text":null}\n{"id":1}\n{"text":"a"}\n{"text":" \\n"}\n{}\n', "~|~|a|~|~"),
    "dots.jsonl text_key=page.text": (
        '{"page":null}\n{"page":{"text":"a","n":NaN}}\n{"page":{}}\n{"page.text":"b"}\n', "~|a|~|b"),
    "struct.parquet text_key=text.a": (table([{"a": "b"}, None], kind=pa.struct({"a": pa.string()})), "b|~"),
    "no-key.jsonl": ('{"head":"a"}\n{"id":1}\n', "~|~|!'article', got nothing among head"),
    "pairs.jsonl prompt_key=p response_key=r": (
        '{"p":"a","r":null}\n{"r":"b"}\n{"p":"a","r":""}\n{"p":"a","r":"b"}\n', "~|~|~|ab"),
    "turns.jsonl messages_key=m": (
        '{"m":[]}\n{"m":null}\n{"m":[{"role":"user","content":null}]}\n{"m":[{"role":"user","content":'
        '[{"type":"text","text":null},{"type":"text","text":"a"}]}]}\n', "~|~|~|a"),
    "turns.csv messages_key=m": ('m\n""\n"[]"\n"[{""role"":""user"",""content"":""a""}]"\n', "~|~|a"),
    "list.json": ("[]", ""),
    "blank.json": (" \n", ""),
    "head.csv": ("id,text\n", ""),
    "cells.csv": ("id,text\n1,\n2,a\n", "~|a"),
    "info.warc": (warc("", head="WARC-Type: warcinfo"), ""),
    "status.warc": (warc("HTTP/1.1 204 N\r\n\r\n", "HTTP/1.1 304 N\r\n\r\n"), ""),
    "length.warc": (warc("", head="WARC-Type: conversion"), "~"),
    "head.warc": (warc("HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 99\r\n\r\n"), "~"),
    "a.mbox": (f"{MAIL}\n\n{MAIL}Subject: x\n\n\n{MAIL}Subject: y\n\na\n", "~|~|a"),
    "a-articles.xml": (WIKI % (PAGE % ("", "") + PAGE % ("", "a")), "~|T\n\na"),
    "Posts.xml": ('<posts>\n<row Id="1" PostTypeId="1" />\n<row Id="2" PostTypeId="2" Body="a" />\n</posts>', "~|a"),
    # What is decoded, or rejected by name.
    "br.warc": (page(brotli.compress(b"<p>a"), "Content-Encoding: br"), "<p>a"),
    "two.warc": (page(gzip.compress(GZ), "Content-Encoding: x-gzip\r\nTransfer-Encoding: gzip, chunked"), "<p>a"),
    "members.warc": (page(GZ + GZ, "Content-Encoding: gzip"), "<p>a<p>a"),
    "deflate.warc": (page(zlib.compress(b"<p>a", wbits=-15), "Content-Encoding: deflate"), "<p>a"),
    "undone.warc": (page(b"<p>a", "Content-Encoding: gzip"), "<p>a"),
    "identity.warc": (page(b"<p>a", "Content-Encoding: identity"), "<p>a"),
    "lf.warc": (
        warc("HTTP/1.1 200 OK\nContent-Type: text/html\nTransfer-Encoding: chunked\n\n3\nabc\n2\nde\n0\n"), "abcde"),
    "plain.warc": (page(b"3\nabcdef", "Transfer-Encoding: chunked"), "3\nabcdef"),
    "zlib.warc": (page(zlib.compress(b"<p>a"), "Content-Encoding: gzip"), "<p>a"),
    "no-header.warc": (page(zstandard.compress(b"<p>a")), "<p>a"),
    "aws.warc": (page(b"4;chunk-signature=x\r\n<p>a\r\n0\r\n\r\n", "Content-Encoding: aws-chunked"), "<p>a"),
    "lie.warc": (page(b"<p>a", "Content-Encoding: br, unknown"), "<p>a"),
    "dcb.warc": (page(b"\xffDCB" + bytes(range(64)), "Content-Encoding: dcb"), "!in the coding 'dcb'"),
    "compress.warc": (page(b"\x1f\x9d\x90" + bytes(64), "Content-Encoding: compress"), "!in the coding 'compress'"),
    "base64.warc": (page(b"PHA+YTwvcD4=", "Content-Encoding: base64"), "!in the coding 'base64'"),
    "chunks.warc": (page(b"3\r\nabc\r\n2\r\ndefgh", "Transfer-Encoding: chunked"), "abcde|!ends early"),
    "codings.warc": (page(b"a", "Content-Encoding:" + "gzip," * 5), "!more than 4 codings"),
    "cut.warc": (page(GZ[:-8], "Content-Encoding: gzip"), "<p>a|!ends early"),
    "crc.warc": (page(GZ[:-8] + bytes(8), "Content-Encoding: gzip"), "!incorrect data check"),
    "pdf.warc": (page(b"%PDF-1.4"), "!got a PDF document"),
    "nul.warc": (page(bytes(9)), "!got binary data"),
    "bytes.txt": (bytes(range(1, 256)) * 9, "!not UTF-8"),
    "nul.txt": (bytes(9), "!NUL bytes alone"),
    "partial.warc": (warc("HTTP/1.1 206 P\r\nContent-Type: text/html\r\n\r\n<p>a"), ""),
    "model-articles.xml": (WIKI % PAGE % ("<model>json</model>", "{}"), "!the model json"),
    "framed.jsonl.sz": (SZ + b"\xfe\1\0\0\0" + SZ, "a|a"),
    "damaged.jsonl.sz": (SZ[:-1] + b"!", "!incorrect data check"),
    "skippable.jsonl.zst": (b"\x50\x2a\x4d\x18\1\0\0\0x" + zstandard.compress(LINE) * 2, "a|a"),
    "dictionary.jsonl.zst": (
        b"\x5d\x2a\x4d\x18" + len(DICTIONARY.as_bytes()).to_bytes(4, "little") + DICTIONARY.as_bytes()
        + DICTED, "a"),
    "no-dictionary.jsonl.zst": (DICTED, "!it needs the dictionary"),
    "alone.jsonl.lzma": (lzma.compress(LINE, lzma.FORMAT_ALONE), "a"),
    "padded.jsonl.xz": (lzma.compress(LINE) + bytes(4) + lzma.compress(LINE), "a|a"),
    "a.jsonl.br": (brotli.compress(LINE), "a"),
    "members.jsonl.gz": (gzip.compress(LINE) * 2, "a|a"),
    "members.jsonl.bz2": (bz2.compress(LINE) * 2, "a|a"),
    "a.jsonl.lz4": (pa.Codec("lz4").compress(LINE, asbytes=True), "a"),
    "stream.arrow.gz": (gzip.compress(stream("a", "b")), "a|b"),
    "samples.tgz": (gzip.compress(tar_bytes({"1.json": LINE, "2.jpg": b"\xff", "2.txt": b"b"})), "a|b"),
    "lines.tar": (tar_bytes({"1.jpg": b"\xff", "1.jsonl.gz": gzip.compress(LINE * 2), "1.cls": b"1"}), "a|a"),
    "volume.tar": (tar(b"M", b"a"), "!a member of the type 'M'"),
    "link.tar": (tar(b"2"), "~"),
    "uuencode.mbox": (f"{MAIL}Subject: x\n\na\nbegin 644 f\n#86)C\n`\nend\nb\n", "a\n\nb"),
    "pgp.mbox": (f"{MAIL}Subject: x\n\n-----BEGIN PGP MESSAGE-----\nx\n", "!PGP"),
    "smime.mbox": (f"{MAIL}Content-Type: application/pkcs7-mime\n\nx\n", "!pkcs7"),
    "unknown.mbox": (f"{MAIL}Content-Transfer-Encoding: x-y\n\nx\n", "!transfer encoding 'x-y'"),
    "signed.parquet": (table(["a"])[:-9] + b"x" + table(["a"])[-8:], "!an encrypted Parquet file"),
    # Dialects of lines.
    "bom.jsonl": (B + LINE + B + LINE, "a|a"),
    "bom.csv": (B + b"text,n\r\na,1\r\n" + B + b"text,n\r\nb,2", "a|b"),
    "bom.txt": (B + b"a\n" + B + b"b", "a\nb"),
    "cr.jsonl": (LINE.replace(b"\n", b"\r") * 3, "a|a|a"),
    "cr.csv": ('n,text\r1,"a\rb"\r2,c\r', "a\rb|c"),
    "two.jsonl": (LINE + LINE[:-1] + LINE + LINE, "a|a|a|a"),
    "seq.jsonl": (b"\x1e" + LINE + b'\x1e{\n"text":"b"}\n', "a|b"),
    "values.json": ('{\n"text":"a"\n}\n{\n"text":"b"\n}', "a|b"),
    "lists.json": ('[{"text":"a"}\n,{"text":"b"}]\n[{"text":"c"}]', "a|b|c"),
    "commas.jsonl": ('[{"text":"a"}\n,\n{"text":"b"}\n]\n', "a|b"),
    "separators.jsonl": ('{"text":"a\u2028b\x85c"}\n{"text":NaN}\n', "a\u2028b\x85c|!got float"),
    "utf16.jsonl": ((LINE * 3).decode().encode("utf-16-le"), "a|a|a"),
    "excel.csv": ("text\tn\r\na;b\t1\r\n".encode("utf-16"), "a;b"),
    "sep.csv": ('sep=;\r\n"text, long";text\r\n"1,5";"a ""b"""\r\n', 'a "b"'),
    "semicolon.csv": ('"a, b, c";text\n1,5;a\n', "a"),
    "powershell.csv": ('#TYPE System.Object\r\n"text"\r\n"a"\r\n', "a"),
    "spark.csv": ('n,text\n1,"a \\"b\\" \\n c"\n2,d\n', 'a "b" \\n c|d'),
    "mysql.csv text_key=1": ('"7",\\N\n"2","a \\"b\\\nc\\\\"\n', '~|a "b\nc\\'),
    "copy.tsv text_key=1": ('7\t"a" \\tb\\n\\\\n\n2\t\\N\n\\.\n', '"a" \tb\n\\n|~'),
    "latex.csv": ('n,text\n1,"\\alpha \\N"\n2,C:\\new\\\n', "\\alpha \\N|C:\\new\\"),
    "stray.csv": ('text,n\n"a" b,1\nc,2\nd\n', "!not CSV|c|!expected 2 fields, got 1"),
    "open.csv": ('text,n\na,1\n"b,2\nc,3\n', "a|!not CSV"),
    "twice.csv": ("text,text\na,b\n", "!expected one column 'text', got 2"),
    "large.csv": ("text,n\n" + "x" * 200_000 + ",1\n", "x" * 200_000),
    "wide.csv": (",".join(map(str, range(5000))) + ",text\n" + "1," * 5000 + "a\n", "a"),
    "reddit.jsonl format=reddit": ('{"subreddit":"s","body":null}\n{"subreddit":"s","body":"a"}\n', "a"),
    # What is damaged or odd at the beginning costs its own record.
    "first.jsonl": (b'{"text":"a\xc0\xaf\n' + LINE, "!not UTF-8|a"),
    "interim.warc": (
        warc("HTTP/1.1 103 E\r\nL: x\r\n\r\nHTTP/1.1 100 C\r\n\r\nHTTP/1.1 200 O\r\nContent-Type: text/html\r\n\r\na"),
        "a"),
    "types.warc": (page(b"a").replace(b"/html", b"/html,text/html a"), "a"),
    "chunk.warc": (page(b"50\r\n<p>a", "Transfer-Encoding: chunked"), "<p>a|!ends early"),
    "xml.warc": (page(b'<?xml encoding="koi8-r"?>\xc1'), '<?xml encoding="koi8-r"?>\u0430'),
    "utf7.mbox": (f"{MAIL}Content-Type: text/plain; charset=utf-7\n\n+AOk-\n", "\xe9"),
    "hz.mbox": (f"{MAIL}Content-Type: text/plain; charset=hz-gb-2312\n\n~{{HK~}}\n", "\u4eba"),
    "kr.mbox": (f"{MAIL}Content-Type: text/plain; charset=iso-2022-kr\n\n\x1b$)C\x0e8p\x0f\n", "\ubaa8"),
    "blank.csv": ("\r\n\r\ntext\r\na\r\n", "a"),
    "bom-alone.csv": (B, ""),
    "ids.csv text_key=1": ("1,a\n2,b\n", "a|b"),
    "pandas.csv text_key=1": (",0,1\n0,x,a\n", "a"),
    "spark-open.csv": ('n,text\n1,"a \\"b\\" c"\n2,"d\n3,e\n', 'a "b" c|!not CSV'),
    "escape.txt": (b"a word \x1b$B\n)(({\x1b)}\x0f$\n\n~0\n\n", "a word \x1b$B\n)(({\x1b)}\x0f$\n\n~0\n\n"),
    "java.txt": (b"a \xed\xa0\xbd\xed\xb8\x80 \xc0\x80 b", "!not UTF-8"),
    "Users.xml": ('<?xml version="1.0"?>\n<users>\n<row Id="1" AboutMe="a" />\n</users>', ""),
    "no-blank.mbox": (f"{MAIL}Subject: x\n\na\n{MAIL}Subject: x\n\nb", "a|b"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_documents_absences_and_rejects(tmp_path, case):
    """`~` is an absence, `!…` a reject whose reason has these words, anything else the text of a document."""
    (name, *settings), (data, words) = case.split(" "), CASES[case]
    path = tmp_path / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    options = dict(setting.split("=") for setting in settings)
    got = [
        f"!{r.problem}" if r.problem else re.sub("[\ufdd0-\ufddf]", "", r.text) for r in read_records(path, **options)
    ]
    expected = words.split("|") if words else []
    assert len(got) == len(expected), got
    for text, requested in zip(got, expected):
        is_reject = requested[0] == text[:1] == "!"
        assert requested[1:] in text if is_reject else requested == (text if text.strip() else "~"), got


def test_an_absence_is_counted_and_stops_nothing(tmp_path, monkeypatch):
    """A part whose records lack the key that others of the file have is no fault; a file of none is."""
    monkeypatch.setattr("forebay.formats.text.SPLIT_BYTES", 5000)
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": None}, {"id": 1}] * 1000 + [{"text": "a"}])
    result = prepare(path, tmp_path / "d")
    assert (result.documents_in, result.documents_out, result.dropped) == (2001, 1, {"empty": 2000})
    assert any(r.failed for r in read_records(path, text_key="body"))
    path.write_text("broken\n" * 1500)
    assert all(r.failed == ("the rest is left out" in r.problem) for r in read_records(path, max_malformed=0.1))


def test_an_id_is_the_digits_in_the_file(tmp_path):
    ids = ["1234567890123456789012345", "-18446744073709551617", "1e3", "1.50", "7"]
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text":"a","id":{name}}}\n' for name in ids))
    (tmp_path / "a.csv").write_text("text,id\n" + "".join(f"a,{name}\n" for name in ids))
    for name in ("a.jsonl", "a.csv"):
        assert [r.id for r in read_records(tmp_path / name)] == ids
    moment, uuid = pa.array([17 * 10**17 + 1], pa.timestamp("ns")), pa.array([bytes(16)], pa.uuid())
    columns = [["a"], [Decimal(ids[0])], moment, [b"a1"], [b"\0"], uuid]
    pq.write_table(pa.table(columns, ["text", "id", *"abcd"]), tmp_path / "a.parquet")
    (record,) = read_records(tmp_path / "a.parquet", columns=dict.fromkeys("abcd", "text"))
    assert (record.id, *record.values[:3]) == (ids[0], "2023-11-14T22:13:20", "a1", "00") and len(
        record.values[3]
    ) == 36


TEXTS = {
    "cp1252 mac_roman cp850": "Où est la « naïve » élève ? À côté du château, où, l'été dernier, elle rêvait déjà",
    "cp1252 iso8859_15": "Für müde Füße: größere Schläuche, süßes Öl und Käse",
    "cp1250 iso8859_2": "Příliš žluťoučký kůň úpěl ďábelské ódy, a také běžel přes řeku",
    "cp1254": "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar, akıl ve vicdana sahiptirler",
    "cp1257": "Visi žmonės gimsta laisvi ir lygūs savo orumu ir teisėmis, jiems suteiktas protas ir sąžinė",
    "cp1251 koi8_r cp866 iso8859_5 mac_cyrillic": "Все люди рождаются свободными и равными в достоинстве",
    "cp1251 koi8_u": "Всі люди народжуються вільними і рівними у своїй гідності та правах",
    "cp1253 iso8859_7": "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα",
    "cp1255": "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם",
    "cp1256 iso8859_6": "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق",
    "cp874": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
    "cp932 euc_jp iso2022_jp": "すべての人間は、生れながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "gb18030 hz utf_16_le": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心。",
    "big5 utf_16_be": "人人生而自由，在尊嚴和權利上一律平等。他們賦有理性和良心。",
    "cp949 utf_32_le": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
}


@pytest.mark.parametrize("encoding, text", [(name, t) for names, t in TEXTS.items() for name in names.split()])
def test_an_encoding_without_a_label(tmp_path, encoding, text):
    """As text, and in the lines and lists of tables, packed and not."""
    text = f"{text}.\n" * 2
    row = json.dumps({"text": text}, ensure_ascii=False)
    files = {"txt": text, "jsonl": f"{row}\n{row}\n", "json": f"[{row}, {row}]", "csv": f'id,text\n1,"{text}"\n'}
    for suffix, full in files.items():
        data = full.encode(encoding)
        (tmp_path / f"a.{suffix}").write_bytes(data)
        (tmp_path / f"a.{suffix}.gz").write_bytes(gzip.compress(data))
    for options in ({}, {"encoding": encoding}):
        assert [(r.text, r.problem) for r in read_records(tmp_path, **options)] == [(text, "")] * 12
