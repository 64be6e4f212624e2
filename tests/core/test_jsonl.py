"""Files of JSON lines: processes that append concurrently, or are killed while appending, lose no line of another."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import threading
from pathlib import Path

from project import ROOT

from sandbox.core import jsonl

APPEND = """
import sys
from pathlib import Path
from sandbox.core import jsonl
for n in range(300):
    jsonl.append(Path(sys.argv[1]), {"who": sys.argv[2], "n": n, "filler": "x" * (n * 37 % 6000)})
"""


def test_two_writers_at_once(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", APPEND, str(file), who], cwd=ROOT) for who in "ab"]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["n"] for row in rows if row["who"] == "a"] == list(range(300))
    assert [row["n"] for row in rows if row["who"] == "b"] == list(range(300))


def test_a_writer_waits_for_another(tmp_path: Path) -> None:
    """No other process may append between reading a file's end and appending."""
    file = tmp_path / "rows.jsonl"
    jsonl.append(file, {"n": 1})
    with file.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        writer = threading.Thread(target=jsonl.append, args=(file, {"n": 2}), daemon=True)
        writer.start()
        writer.join(0.2)
        assert jsonl.read(file) == [{"n": 1}]
    writer.join(30)
    assert jsonl.read(file) == [{"n": 1}, {"n": 2}]


def test_a_line_that_was_cut_off_costs_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    jsonl.append(file, {"n": 1})
    with file.open("a") as stream:
        stream.write('{"n": 2, "tile": "BLO')
    jsonl.append(file, {"n": 3})
    assert jsonl.read(file) == [{"n": 1}, {"n": 3}]
    assert jsonl.read(tmp_path / "none.jsonl") == []
