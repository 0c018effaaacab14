"""Sweeps' cells: their keys and arguments, grids from files and flags, and the choice among them."""

from dataclasses import replace

import pytest

from common.checkout import ROOT
from common.errors import ConfigError
from reproduce import sweep
from reproduce.sweeping.cells import Cell, Sweep, cells_of, labels, read_grid, select

SELFSPEC = "tests/selfspec_benchmark.py"


def test_a_key_is_of_what_is_run_whatever_the_order():
    flags = {"B": 8, "benchmark": True, "budgets": [64, 128]}
    cell = Cell(SELFSPEC, flags)
    assert cell.key == "ac5dc47c9c9f9c2a", "rows that were written by earlier versions would be run again"
    for same in (dict(reversed(flags.items())), {"compile": False, "seed": None}, {"budgets": (64, 128)}):
        assert cell.key == replace(cell, flags=flags | same).key
    others = [flags | {"B": 4}, flags | {"B": True}, flags | {"budgets": [128, 64]}, flags | {"seed": 0}, {}]
    keys = {replace(cell, flags=other).key for other in others}
    assert len(keys | {cell.key, replace(cell, script="tests/longspec_benchmark.py").key}) == len(others) + 2


def test_flags_become_arguments():
    cell = Cell(SELFSPEC, {"B": 8, "benchmark": True, "compile": False, "seed": None, "budgets": [64, 128], "x": -1})
    assert cell.argv() == [str(ROOT / SELFSPEC), "--B", "8", "--benchmark", "--budgets", "64", "128", "--x=-1"]
    beside = Cell("tests/baseline_benchmark.py", {})
    assert labels([cell, beside])[0] == "selfspec_benchmark B=8 benchmark budgets=64,128 x=-1"


@pytest.mark.parametrize("script", [SELFSPEC, "tests/longspec_benchmark.py", "tests/baseline_benchmark.py"])
def test_benchmarks_that_sample_decode_one_text_in_all_cells(script):
    """Unless a mode is named. A row of another mode is another cell: it is not taken for one of these."""
    sampled = Cell(script, {"temperature": 0.6, "n_sink": 8})
    assert sampled.argv()[1:] == ["--verification", "coupled", "--temperature", "0.6", "--n_sink", "8"]
    named = Cell(script, {"temperature": 0.6, "verification": "rejection"})
    assert sampled.key == Cell(script, {**sampled.flags, "verification": "coupled"}).key
    assert sampled.key != Cell(script, {**sampled.flags, "verification": "rejection"}).key
    assert sorted(named.argv()[1:]) == ["--temperature", "--verification", "0.6", "rejection"]
    assert "coupled" in Cell(script, {"temperature": "0.6"}).argv()
    for flags in ({}, {"temperature": 0}, {"temperature": 0.0, "n_sink": 8}):
        assert "coupled" not in Cell(script, flags).argv(), "greedy text is the same for all"
    assert "coupled" not in Cell("reproduce/certify.py", {"temperature": 0.6}).argv(), "it has no such flag"


def test_a_grid_is_the_product_of_its_axes_in_order():
    cells = Sweep(SELFSPEC, {"B": 2}, {"gamma": [1, 3], "budgets": [[64, 128], 256]}).cells()
    points = [(gamma, budgets) for gamma in (1, 3) for budgets in ([64, 128], 256)]
    assert [cell.flags for cell in cells] == [{"B": 2, "gamma": gamma, "budgets": budgets} for gamma, budgets in points]
    assert labels(cells)[0] == "gamma=1 budgets=64,128"
    assert [cell.flags for cell in Sweep(SELFSPEC, {"B": 2}, {}).cells()] == [{"B": 2}]


def test_grid_files(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text("""
        [[sweep]]
        script = "tests/selfspec_benchmark.py"
        [sweep.flags]
        benchmark = true
        [sweep.axes]
        B = [1, 8]
        gamma = [1, 3]
        [[sweep]]
        script = "tests/baseline_benchmark.py"
    """)
    *selfspec, last = cells_of(read_grid(path), {}, {})
    assert [cell.flags for cell in selfspec] == [
        {"benchmark": True, "B": B, "gamma": g} for B, g in ((1, 1), (1, 3), (8, 1), (8, 3))
    ]
    assert (last.script, last.flags) == ("tests/baseline_benchmark.py", {})
    assert labels([*selfspec, last])[0] == "selfspec_benchmark benchmark B=1 gamma=1"
    assert len(cells_of(read_grid(ROOT / "reproduce" / "grids" / "example.toml"), {}, {})) > 4


def test_what_is_given_stands_in_the_place_of_what_a_file_says():
    sweeps = [Sweep(SELFSPEC, {"B": 2}, {"gamma": [1, 3]}), Sweep(SELFSPEC)]
    first, *others = cells_of(sweeps, {"gamma": 5, "seed": 1}, {"B": [4, 8]})
    assert first.flags == {"gamma": 5, "seed": 1, "B": 4}
    assert [cell.flags for cell in others] == [{"gamma": 5, "seed": 1, "B": 8}, {"seed": 1}]


def test_choosing_cells():
    flags = [{"gamma": 1}, {"gamma": 3, "benchmark": True}, {"gamma": 3, "benchmark": False, "budgets": [64, 128]}]
    cells = [Cell(SELFSPEC, each | {"B": 8}) for each in flags]
    for only, wanted in (
        ([], cells),
        (["gamma=3"], cells[1:]),
        (["gamma=3", "benchmark=true"], cells[1:2]),
        (["gamma=3", "gamma=1"], cells),
        (["benchmark=false", "B=8"], cells[2:]),
        (["budgets=64,128"], cells[2:]),
        ([cells[1].key[:6]], cells[1:2]),
        ([cells[1].key, cells[0].key], cells[:2]),
    ):
        assert select(cells, only) == wanted
    for nothing in (["gamma=2"], ["gama=3"], ["gamma=1", "benchmark=true"], ["gamma"], [""], ["0" * 16]):
        with pytest.raises(ConfigError, match="no cell matches") as error:
            select(cells, nothing)
        assert "gamma=1|3" in str(error.value) and "B=8" not in str(error.value)


def test_values_on_the_command_line():
    values = {"3": 3, "0.5": 0.5, "true": True, "[64, 128]": [64, 128], '"3"': "3", "int8": "int8", "1,2": "1,2"}
    assert {text: sweep.value_of(text) for text in values} == values
    assert sweep.value_of("0-9,20-29") == "0-9,20-29"
    axes = {"1,2": [1, 2], "greedy, coupled": ["greedy", "coupled"], "int8,4": ["int8", 4], "[1, 2],3": [[1, 2], 3]}
    assert {text: sweep.values_of(text) for text in axes} == axes
