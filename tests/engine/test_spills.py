"""Tables of tiles that spill registers: which rows apply to a problem."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from sandbox.core import registry
from sandbox.core.score import Score
from sandbox.engine import spills
from sandbox.engine.spills import Row, Table
from sandbox.spec import Problem, Tile

P = Problem(2, 4, 64, 64, 64, dtype="float16")
TILE = Tile(BLOCK_M=64, BLOCK_N=32, BLOCKS=132)
TEXT = "BLOCK_M=64,BLOCK_N=32"


def changed(**fields: Any) -> Problem:
    return dataclasses.replace(P, **fields)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, ""),
        ({"causal": "bottom-right"}, "CAUSAL=1"),
        ({"window": (3, 2)}, "WINDOW=1 WINDOW=2"),
        ({"window": (None, 2)}, "WINDOW=2"),
        ({"softcap": 2.0}, "SOFTCAP=1"),
        ({"softcap": 6000.0}, "SOFTCAP=1"),
        ({"bias": (2, 4, 64, 64), "bias_boxes": False}, "BIAS=0"),
        ({"bias": (2, 4, 64, 64), "bias_dtype": "float32", "bias_boxes": False}, "BIAS=0"),
        ({"bias": (2, 4, 64, 1), "bias_boxes": False}, "BIAS=4"),
        ({"page_size": 16, "key_lengths": True}, "KEY_LENGTHS=1 PAGE_SIZE=0"),
        ({"Dv": 32}, "HEAD_DIM_V=0"),
        ({"score": Score("x * 2")}, "SCORE_CHANGES=1"),
        ({"score": Score(mask="j < i")}, "SCORE_HIDES=1"),
        ({"dtype": "float8_e4m3", "descale": (1.0, (2, 4), 1.0)}, "DESCALE=2 DESCALE=8"),
        ({"kv_dtype": "float8_e4m3"}, "DESCALE=8"),
    ],
    ids=str,
)
def test_options_that_affect_registers(fields: dict[str, Any], options: str) -> None:
    assert spills.options_of(changed(**fields)) == {*options.split()}


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "bfloat16"}, "float16"),
        ({"dtype": "float8_e5m2"}, "float8_e4m3"),
        ({"kv_dtype": "float8_e5m2"}, "float16"),
    ],
)
def test_dtypes_of_one_size_have_one_row(fields: dict[str, Any], dtype: str) -> None:
    assert spills.dtype_of(changed(**fields)) == dtype


def test_the_head_dimensions_that_are_compiled() -> None:
    assert spills.widths_for(()) == spills.widths_for(["CAUSAL=1", "DESCALE=8"]) == spills.PLAIN_WIDTHS
    assert spills.widths_for(["CAUSAL=1", "DESCALE=1"]) == spills.WIDTHS
    assert spills.text_of(TILE) == TEXT


@pytest.mark.parametrize(
    ("fields", "arch", "spilled"),
    [
        ({}, (9, 0), 1),
        ({"D": 60, "Dv": 60}, (9, 0), 1),  # rounded up to 64
        ({"D": 65}, (9, 0), 2),  # 80
        ({"Dv": 66}, (9, 0), 2),
        ({"D": 112, "Dv": 112}, (9, 0), 0),
        ({"D": 300, "Dv": 300}, (9, 0), 0),
        ({"causal": "bottom-right"}, (9, 0), 5),
        ({"causal": "bottom-right", "softcap": 2.0}, (9, 0), 7),
        ({"softcap": 2.0}, (9, 0), 1),  # no row has it alone
        ({"causal": "bottom-right", "softcap": 2.0, "D": 65, "Dv": 65}, (9, 0), 8),  # with options 65 is rounded to 96
        ({"dtype": "bfloat16"}, (9, 0), 1),
        ({"dtype": "float32"}, (9, 0), 0),
        ({}, None, 1),  # the CPU backend
        ({}, (8, 0), 20),
        ({}, (8, 6), 20),
        ({}, (7, 5), 20),  # before the first
        ({}, (9, 9), 1),
        ({}, (10, 0), 3),  # and 1 of 9.0
        ({"causal": "bottom-right"}, (10, 3), 5),  # of 9.0
    ],
    ids=str,
)
def test_rows_that_apply(fields: dict[str, Any], arch: tuple[int, int] | None, spilled: int) -> None:
    """The maximum of all whose options the problem has, for its architecture or the nearest before."""
    table = Table(
        ["sm_100", "sm_80", "sm_90"],
        [
            Row("sm_90", TEXT, "float16", "", {64: 1, 80: 2}),
            Row("sm_90", TEXT, "float16", "CAUSAL=1", {64: 5, 80: 4}),
            Row("sm_90", TEXT, "float16", "CAUSAL=1 SOFTCAP=1", {64: 7, 80: 99, 96: 8}),
            Row("sm_90", "BLOCK_M=32,BLOCK_N=32", "float16", "", {64: 50}),
            Row("sm_80", TEXT, "float16", "", {64: 20}),
            Row("sm_100", TEXT, "float16", "", {64: 3}),
        ],
    )
    assert table.spilled(changed(**fields), TILE, arch) == spilled


def test_an_empty_table() -> None:
    assert Table([], []).spilled(P, TILE, (9, 0)) == 0


def test_a_table_in_a_file(tmp_path: Path) -> None:
    """Sorted; read again after an edit. A kernel without one spills nothing that is known."""
    kernel = dataclasses.replace(registry.get("fwd_minimal"), source=tmp_path / "fwd_minimal.cu")
    file = spills.path(kernel)
    assert file == tmp_path / "fwd_minimal.spills.json"
    assert spills.read(file) == {"nvrtc": "", "archs": [], "rows": []}
    assert spills.spilled(kernel, P, TILE, (9, 0)) == 0
    rows = [Row("sm_90", TEXT, "float16", "SINK=1", {64: 2}), Row("sm_90", TEXT, "float16", "", {64: 9, 80: 1})]
    spills.write(file, "13.0", ["sm_90", "sm_80"], rows)
    assert spills.read(file) == {"nvrtc": "13.0", "archs": ["sm_80", "sm_90"], "rows": rows[::-1]}
    assert len(file.read_text().splitlines()) == 4
    assert spills.spilled(kernel, P, TILE, (9, 0)) == 9
    spills.write(file, "13.0", ["sm_90"], [])
    os.utime(file, ns=(1, 1))
    assert spills.spilled(kernel, P, TILE, (9, 0)) == 0
    assert spills.read(file)["rows"] == []
