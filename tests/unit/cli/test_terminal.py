"""Nothing that a terminal would obey comes out of a command."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from forebay.cli import main
from forebay.cli.parser import filtered_streams
from forebay.errors import printable


@given(st.text())
def test_control_characters_come_out_as_their_escapes(text):
    shown = printable(text)
    assert all(c.isprintable() or not c.isascii() for c in shown)
    assert not set(shown) & set("\n\x1b\x9b\r\x07\x7f\x85\u2028\u202e")
    assert printable(shown) == shown
    if text.isprintable():
        assert shown == text


def test_what_escapes_look_like():
    assert printable("a\x1b[2J\tb\nc\x9b", keep="\n\t") == "a\\x1b[2J\tb\nc\\x9b"
    assert printable("50%\r", keep="\r") == "50%\r" and printable("50%\r\n\u202e") == "50%\\r\\n\\u202e"
    assert printable("\x1b" * 9, 10) == "\\x1b\\x1b\\x"
    assert printable("naïve – 日本 🙂") == "naïve – 日本 🙂"


def test_results_and_errors_of_a_command_are_filtered(capsys, tmp_path):
    before = sys.stdout, sys.stderr
    with filtered_streams():
        print("result \x1b]0;owned\x07")
        print("error \x1b[31m", file=sys.stderr)
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("result \\x1b]0;owned\\x07\n", "error \\x1b[31m\n")
    assert main(["inspect", str(tmp_path / "no\x1b[2Jname")]) != 0
    message = capsys.readouterr()
    assert "\x1b" not in message.out + message.err and "\\x1b[2J" in message.err
