"""`personae simulate`: what the commands print, and the chart that they draw."""

import xml.etree.ElementTree as ET
from pathlib import Path

from typer.testing import CliRunner

from personae.api.cli import app

SMALL = ["simulate", "capacity", "--requests", "120", "--rate", "40", "--adapters", "5", "--prompt", "40"]
SMALL += ["--answer", "20", "--slots", "8", "--costs", "step=0.01,row=0.002", "--most", "6"]


def test_seeds_are_drawn_and_counted() -> None:
    result = CliRunner().invoke(app, ["simulate", "seeds", "--count", "2", "--requests", "20"])
    assert result.exit_code == 0, result.output
    assert "2 seeds, 0 with violations" in result.output


def test_capacity_says_how_many_replicas_are_enough_and_draws_them(tmp_path: Path) -> None:
    file = tmp_path / "replicas.svg"
    result = CliRunner().invoke(app, [*SMALL, "--first-goal", "0.3", "--chart", str(file)])
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()[1:-1]]
    met = [int(row[0]) for row in rows if "meets" in row]
    assert met[0] > 1, "one replica is too few here, or the table shows nothing"
    assert f"{met[0]} replicas are enough" in result.output
    waits = [float(row[1]) for row in rows]
    assert waits == sorted(waits, reverse=True), "more replicas, less waiting"
    drawn = ET.parse(file).getroot()
    assert len(drawn.findall(".//{*}circle")) == 2 * len(rows)


def test_a_cost_that_does_not_exist_is_named() -> None:
    result = CliRunner().invoke(app, ["simulate", "capacity", "--costs", "stepp=1"])
    assert result.exit_code == 2
    assert "stepp" in result.output
