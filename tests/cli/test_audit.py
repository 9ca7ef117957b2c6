"""Showing what an audit found: exit codes, JSON alone on standard output, HTML."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stemkv.audit.verdict import AuditReport, Check, Table, Verdict
from stemkv.cli.app import app
from stemkv.cli.audit import exit_code, show_report, write_reports


def report(*verdicts: Verdict, name: str = "identity") -> AuditReport:
    return AuditReport(
        name=name,
        headline="what was found [bold]",
        checks=tuple(
            Check(claim=f"claim {i} [red]", verdict=verdict, evidence="3 of 4 <b>")
            for i, verdict in enumerate(verdicts)
        ),
        tables=(
            Table(
                title="pairs",
                columns=("key", "wrong"),
                rows=(("ours [x]", 0), ("tokens", 1234), ("none", None)),
            ),
        ),
        method={"model": "tiny"},
        data={"pairs": [[1, 2]]},
    )


HOLDS, BROKEN, UNSURE = Verdict.HOLDS, Verdict.BROKEN, Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    "verdicts, code",
    [
        ([[HOLDS]], 0),
        ([[HOLDS, HOLDS], [HOLDS]], 0),
        ([[HOLDS, UNSURE]], 3),
        ([[UNSURE], [HOLDS, BROKEN]], 1),
        ([[BROKEN]], 1),
        ([[]], 3),  # an audit that checked nothing has shown nothing
    ],
)
def test_the_exit_code_is_the_worst_verdict(
    verdicts: list[list[Verdict]], code: int
) -> None:
    assert exit_code([report(*each) for each in verdicts]) == code


def test_json_on_standard_output_is_all_there_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_reports([report(HOLDS)], json_file=Path("-"), html_file=None)

    read = json.loads(capsys.readouterr().out)
    assert read["verdict"] == "holds"
    assert read["tables"][0]["rows"][1] == ["tokens", 1234]
    assert read["data"] == {"pairs": [[1, 2]]}


def test_several_reports_are_a_list_and_one_page(tmp_path: Path) -> None:
    reports = [report(HOLDS), report(BROKEN, name="exact")]
    write_reports(
        reports, json_file=tmp_path / "all.json", html_file=tmp_path / "all.html"
    )

    read = json.loads((tmp_path / "all.json").read_text())
    assert [each["audit"] for each in read] == ["identity", "exact"]
    page = (tmp_path / "all.html").read_text()
    assert "3 of 4 &lt;b&gt;" in page
    assert "exact broken" in page


def test_brackets_in_what_is_printed_are_no_markup(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_report(report(HOLDS))

    out = capsys.readouterr().out
    for text in ("claim 0 [red]", "what was found [bold]", "ours [x]"):
        assert text in out


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["audit", "exact", "--model", "no/such/model"], "does not exist"),
        (["audit", "exact", "--dtype", "int8"], "dtype must be"),
        (["audit", "exact", "--numerics", "loose"], "numerics must be"),
        (["audit", "exact", "--num-prompts", "0"], "--num-prompts must be"),
        (["audit", "identity", "--key", "nothing"], "key"),
        (["audit", "identity", "--adapter", "only-one"], "adapter"),
        (["audit", "all", "--threads", "-3"], "--threads must be"),
        (["audit", "all", "--threads", "0"], "--threads must be"),
        (["audit", "all", "--json", "."], "is a folder"),
        (["audit", "all", "--html", "no/such/folder/a.html"], "does not exist"),
    ],
)
def test_a_wrong_call_ends_with_a_sentence_and_code_two(
    arguments: list[str], complaint: str
) -> None:
    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 2
    assert complaint in result.output
