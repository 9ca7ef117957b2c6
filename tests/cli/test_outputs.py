"""What is written is whole, never over what is read, and steers no terminal."""

from __future__ import annotations

import io
import json
import os
import subprocess
from pathlib import Path

import pytest
import typer
from rich.console import Console

from stemkv.cli import outputs
from stemkv.cli.app import app
from stemkv.cli.outputs import STDOUT, check_outputs, print_section, replaced
from stemkv.cli.outputs import write_text as write
from stemkv.errors import ConfigError, InvariantError
from stemkv.report import Section
from tests.cli.traces import QUICK, command, small_trace, stemkv, writes


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# Over nothing


@pytest.mark.parametrize("other", ["a", "./a", "d/../a", "link", "hard"])
def test_one_file_is_never_named_twice_by_whatever_path(other: str) -> None:
    Path("d").mkdir()
    Path("a").write_text("read")
    Path("link").symlink_to("a")
    Path("hard").hardlink_to("a")
    one, two = Path("a"), Path(other)

    with pytest.raises(ConfigError, match=r"--html .* is the same file as --json"):
        check_outputs({"--html": one, "--json": two})
    with pytest.raises(ConfigError, match=r"--json .* the trace .* which is read"):
        check_outputs({"--json": two}, {"the trace": "a"})
    check_outputs({"--json": Path("b"), "--html": None}, {"the trace": "a"})


def test_two_files_that_do_not_exist_yet_are_told_apart() -> None:
    with pytest.raises(ConfigError, match="same file"):
        check_outputs({"--html": Path("new"), "--json": Path("x/../new")})
    check_outputs({"--html": Path("new"), "--json": Path("newer")})


def test_streams_and_devices_may_be_named_twice() -> None:
    nowhere = Path(os.devnull)
    check_outputs({"--html": nowhere, "--json": nowhere})
    check_outputs({"--json": STDOUT}, {"the trace": "-"})


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["replay", "TRACE", "--json", "TRACE"], "--json"),
        (["replay", "TRACE", "--html", "TRACE"], "--html"),
        (["replay", "TRACE", "--parquet", "TRACE"], "--parquet"),
        (["replay", "TRACE", "--timeline", "TRACE"], "--timeline"),
        (["replay", "x", "--cost", "TRACE", "--json", "TRACE"], "--cost"),
        (["replay", *QUICK, "--html", "o", "--parquet", "o"], "--parquet o"),
        (["sweep", "TRACE", "--json", "TRACE"], "--json"),
        (["sweep", *QUICK, "--html", "o", "--json", "o"], "--json o"),
        (["value", "--html", "o", "--json", "o"], "--json o"),
        (["value", "--cost", "TRACE", "--json", "TRACE"], "--cost"),
        (["calibrate", "--out", "o", "--json", "o"], "--json o"),
        (["demo", "--html", "o", "--json", "o"], "--html o"),
        (["audit", "all", "--html", "o", "--json", "o"], "--html o"),
        (["identity", "TRACE", "--json", "TRACE"], "the model"),
        (["generate", "--prompt=a", "--settings=TRACE", "--json=TRACE"], "--settings"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_every_command_refuses_to_write_over_what_it_reads_or_writes(
    arguments: list[str], named: str, tmp_path: Path
) -> None:
    trace = small_trace(tmp_path)
    before = trace.read_bytes()
    words = [each.replace("TRACE", trace.name) for each in arguments]

    result = stemkv(*words)

    assert result.exit_code == 2, result.output
    assert "is the same file as" in result.stderr
    assert named in result.stderr
    assert trace.read_bytes() == before
    assert not Path("o").exists()


@pytest.mark.parametrize(
    "arguments",
    [["value", "--html", "-"], ["demo", "--html", "-"], ["calibrate", "--out", "-"]],
    ids=" ".join,
)
def test_only_json_goes_to_standard_output(arguments: list[str]) -> None:
    result = stemkv(*arguments)

    assert result.exit_code == 2
    assert "only --json can be written to standard output" in result.stderr


# Whole or not at all


def test_a_write_that_fails_leaves_what_was_there() -> None:
    file = Path("report")
    file.write_text("old")

    def fail() -> None:
        with replaced(file) as path:
            path.write_text("half of the n")
            raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="report could not be written: No space"):
        fail()

    assert file.read_text() == "old"
    assert os.listdir() == ["report"]


def test_links_and_modes_stay_as_they_are() -> None:
    Path("file").write_text("old")
    Path("file").chmod(0o640)
    Path("link").symlink_to("file")

    write("new", Path("link"))

    assert Path("link").is_symlink()
    assert Path("file").read_text() == "new"
    assert Path("file").stat().st_mode & 0o777 == 0o640


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_device_is_a_sentence_that_names_it() -> None:
    result = stemkv("replay", *QUICK, "--no-curves", "--json", "/dev/full")

    assert result.exit_code == 2
    assert "/dev/full could not be written: No space left on device" in result.stderr


def test_a_folder_that_cannot_be_written_is_found_before_the_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outputs.os, "access", lambda path, mode: False)

    result = stemkv("replay", *QUICK, "--html", "a.html")

    assert result.exit_code == 2
    assert "--html: a.html cannot be written: permission denied" in result.stderr
    assert "replaying" not in result.stderr


# Terminals and streams


def test_a_table_shows_what_cells_hide() -> None:
    out = io.StringIO()
    section = Section(
        title="t\x07", columns=("who",), rows=[("a\x1b[2J\u202eb\ud800",)]
    )

    print_section(Console(file=out, width=80), section)

    assert r"a\x1b[2J\u202eb\ud800" in out.getvalue()
    assert not set("\x07\x1b\u202e\ud800") & set(out.getvalue())


def test_names_in_a_trace_steer_no_terminal(tmp_path: Path) -> None:
    tenants = ("evil\x1b]0;owned\x07", "n" * 60)
    trace = small_trace(tmp_path, tenants=tenants)

    for clock in ("--clock", "--no-clock"):
        result = stemkv("replay", trace, clock)

        assert result.exit_code == 0, result.stderr
        assert not set("\x1b\x07") & set(result.output)
        assert r"evil\x1b]0;owned\x07" in result.stdout
        assert "n" * 60 not in result.stdout
    document = stemkv("replay", trace, "--no-curves", "--json", "-").stdout
    names = [each["tenant"] for each in json.loads(document)["tenants"]]
    assert sorted(names) == sorted(tenants)


def test_what_an_error_names_steers_no_terminal() -> None:
    result = stemkv("replay", "no\x1b[31m/such")

    assert result.exit_code == 2
    assert "\x1b" not in result.stderr
    assert r"no\x1b[31m/such" in result.stderr


@pytest.mark.parametrize(
    "closing, sentence",
    [(">&-", "standard output is closed"), ("<&-", "standard input is closed")],
)
def test_a_closed_stream_is_a_sentence(closing: str, sentence: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closing}', "sh", *command("replay", "-")],
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


# Errors and help


@pytest.mark.parametrize("error", [InvariantError("a sum"), OverflowError("too large")])
def test_a_defect_of_ours_looks_like_nobody_elses_mistake(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("stemkv.cli.replay.replay", broken)

    result = stemkv("replay", *QUICK)

    assert result.exit_code == 70
    assert f"internal error: {error}" in result.stderr
    assert "please report it" in result.stderr
    assert "Traceback" in result.stderr


@pytest.mark.parametrize(
    "arguments, ours, typed",
    [
        ([*QUICK, "--max-running", "0"], "max_num_running", "--max-running must be"),
        ([*QUICK[:4], "--blocks", "0"], "num_blocks", "--blocks must be"),
        ([*QUICK, "--device", "x"], "`Device`", "bring measured costs with --cost"),
        (["strange.jsonl"], "fields=", "--map prompt=request.text"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_errors_speak_of_what_was_typed(
    arguments: list[str], ours: str, typed: str, tmp_path: Path
) -> None:
    writes(tmp_path, {"what": "is this"}, name="strange.jsonl")

    result = stemkv("replay", *arguments)

    assert result.exit_code == 2
    assert typed in result.stderr
    assert ours not in result.stderr


def test_notes_of_a_trace_speak_of_options_too(tmp_path: Path) -> None:
    record = {"input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    hurried = ({**record, "timestamp": i * 0.001} for i in range(100))

    result = stemkv("replay", writes(tmp_path, *hurried), "--no-curves", "--no-clock")

    assert result.exit_code == 0, result.stderr
    text = " ".join(result.stdout.split())
    assert "as in --map arrival=timestamp:s" in text
    assert "fields=" not in text


def leaves(command: object, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the words of every command and group below one."""
    below = getattr(command, "commands", {})
    found = [path] if path else []
    return found + [
        leaf for name, each in below.items() for leaf in leaves(each, (*path, name))
    ]


@pytest.mark.parametrize("words", leaves(typer.main.get_command(app)), ids=" ".join)
def test_the_help_of_every_command_has_an_example(words: tuple[str, ...]) -> None:
    result = stemkv(*words, "--help")

    assert f"Example: stemkv {words[0]} " in " ".join(result.stdout.split())
