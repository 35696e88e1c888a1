"""The command line as a whole: help, defaults, what was meant, completion, logs, and what its help costs."""

import argparse
import contextlib
import json
import logging
import math
import sys
import tomllib
import warnings

import pytest

from forebay.cli import main, make_parser
from forebay.cli.parser import PANELS, logging_to_stderr, report_failure, walk
from forebay.prepare.config import recipe_text


def test_every_option_has_help_and_tells_its_default():
    silent, undocumented = [], []
    for path, parser in walk(make_parser()):
        shown = " ".join(parser.format_help().split())
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) or action.help is argparse.SUPPRESS:
                continue
            name = " ".join((*path, *(action.option_strings or [action.dest])))
            if not action.help:
                silent.append(name)
            elif action.option_strings and action.default not in (None, False, [], "", argparse.SUPPRESS):
                default = f"{action.default:g}" if isinstance(action.default, float) else str(action.default)
                reported = "default" in action.help or f"({default})" in action.help or f"(default: {default})" in shown
                undocumented += [] if reported else [name]
    assert not silent and not undocumented


def test_every_command_is_in_one_panel():
    (_, parser), *_ = walk(make_parser())
    commands = [path[0] for path, _ in walk(parser) if len(path) == 1]
    assert sorted(name for names in PANELS.values() for name in names) == sorted(commands)
    assert all(f"\n  {name:<12}" in parser.format_help() for name in commands)


def test_logs_are_lines_of_text_or_json(capsys):
    log = logging.getLogger("forebay.network")
    arguments = make_parser().parse_args(["--log-format", "json", "find", "x", "-v"])
    assert arguments.default_log_level == "info"
    with logging_to_stderr(arguments):
        log.info("listening: address=%s", "a:1")
        log.debug("not shown")
    listening = json.loads(capsys.readouterr().err)
    assert (listening["level"], listening["logger"]) == ("info", "forebay.network")
    assert listening["message"] == "listening: address=a:1" and listening["address"] == "a:1"
    with logging_to_stderr(make_parser().parse_args(["verify", "x"])):
        log.info("not shown either")
        log.warning("shown")
    assert capsys.readouterr().err.endswith("WARNING forebay.network: shown\n")


def test_json_logs_have_all_that_is_written_to_stderr(capsys):
    """Lines of libraries, warnings, what is printed, and an error that nothing caught: one object a line."""
    arguments = make_parser().parse_args(["--log-format", "json", "find", "x"])
    with pytest.raises(SystemExit), warnings.catch_warnings(), logging_to_stderr(arguments):
        warnings.simplefilter("always")
        logging.getLogger("uvicorn.error").error("bad request: status=%d ratio=%.2f 100%% of=%s", 400, 0.5, None)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        print("two\nlines \x1b[0m", file=sys.stderr)
        logging.getLogger("forebay.x").error("wait_s=%g name=%s\nand more", math.inf, "level")
        report_failure("DatasetError", "no such dataset. Check it.", False, log_format="json")
        raise RuntimeError("unexpected")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    library, warning, *printed, more, failure, error = lines
    assert (library["status"], library["ratio"], library["of"], library["level"]) == (400, 0.5, "None", "error")
    assert warning["logger"] == "py.warnings" and "DeprecationWarning: old" in warning["message"]
    assert [line["message"] for line in printed] == ["two", "lines \x1b[0m"]
    assert more["wait_s"] == "inf" and more["message"].endswith("\nand more")
    assert (failure["message"], failure["level"]) == ("no such dataset. Check it.", "error")
    assert "RuntimeError: unexpected" in error["traceback"]


@pytest.mark.parametrize("arguments", [["verify", "nothing", "--json"], ["verify", "--json"]])
def test_an_error_is_an_object_with_json(arguments, monkeypatch,
                                         capsys):  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["forebay", *arguments])
    with contextlib.suppress(SystemExit):
        main(arguments)
    error = json.loads(capsys.readouterr().out.splitlines()[-1])["error"]
    assert set(error) == {"type", "message", "hint"} and error["type"] and error["hint"]


@pytest.mark.parametrize("name", ["c4", "fineweb"])
def test_a_recipe_and_the_table_of_its_name_are_both_shown(name, capsys):
    assert main(["prepare", "--explain", name]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(recipe_text(name)) and f"# [{name}]" in shown
    assert tomllib.loads(shown) == tomllib.loads(recipe_text(name))


def test_a_wrong_limit_is_refused_before_a_network_is_joined(tmp_path, capsys):
    assert main(["scheduler", "d", "--identity", str(tmp_path / "none"), "--limit", "nothing=1"]) == 2
    assert "--limit: expected NAME=NUMBER" in capsys.readouterr().err
