"""`bits`: the guarantees of the specs, by experiment."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from sandbox.cli import cli
from sandbox.core import registry
from sandbox.core.errors import SpecError
from sandbox.core.kernel import INVARIANCES, Kernel
from sandbox.launch.dlpack import HOST, Device
from sandbox.verify import bits

KERNELS = [k for k in registry.kernels().values() if k.computes in ("forward", "backward")]
GUARANTEES = [
    (kernel.name, change, invariant)
    for kernel in KERNELS
    for invariant in (False, True)
    for change in ((bits.guaranteed(kernel) if kernel.invariant_tile else ()) if invariant else kernel.invariant_to)
]


def tried(kernel: Kernel, change: str, invariant: bool, device: Device = HOST) -> bits.Finding:
    return bits.compare(bits.base_of(kernel, device, None, 1, invariant), change, device)


@pytest.mark.sampled(80)
@pytest.mark.parametrize(("name", "change", "invariant"), GUARANTEES)
def test_guarantees(name: str, change: str, invariant: bool) -> None:
    found = tried(registry.get(name), change, invariant)
    assert (found.equal, found.declared) == (True, True), found.detail


def test_splits_that_follow_from_the_problem() -> None:
    """fwd_decode's number of splits depends on BLOCKS, fwd_wgmma_invariant's does not."""
    base = bits.base_of(registry.get("fwd_wgmma_invariant"), HOST, None, 1, True)
    pairs = [*bits.CHANGES["splits"](base)]
    assert [second.what for _, second in pairs] == ["one split instead of 3"]
    assert tried(base.kernel, "splits", invariant=True).equal


@pytest.mark.parametrize("name", ["fwd_block2d", "fwd_minimal"])
@pytest.mark.sampled(2)
def test_float8_with_invariant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other kernel of the forward takes float8 queries with invariant=True (docs/bits.md)."""
    kernels = {k.name for k in KERNELS if k.computes == "forward" and k.invariant_tile and "float8_e4m3" in k.dtypes}
    assert kernels == {"fwd_block2d", "fwd_minimal"}
    monkeypatch.setattr(bits, "usual_dtypes", lambda kernel: ["float8_e4m3"])
    found = [tried(registry.get(name), change, invariant=True) for change in ("batch", "queries", "pages")]
    assert [(f.equal, f.declared) for f in found] == [(True, True)] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", [kernel.name for kernel in KERNELS if kernel.invariant_to])
def test_guarantees_on_a_gpu(name: str) -> None:
    found = [*bits.examine([registry.get(name)], ("cuda", 0), 1)]
    assert found
    assert [bits.sentence(f) for f in found if f.violated] == []


def test_a_false_guarantee_is_detected() -> None:
    """The first difference, as a sentence; the mark of the table."""
    fwd_mma = registry.get("fwd_mma")
    planted = dataclasses.replace(fwd_mma, invariant_to=(*fwd_mma.invariant_to, "queries"))
    found = tried(planted, "queries", invariant=False)
    assert found.violated
    assert bits.mark(found) == "BROKEN"
    assert bits.sentence(found).startswith("BROKEN fwd_mma, queries: queries ")
    assert not tried(fwd_mma, "queries", invariant=False).violated


def test_declarations() -> None:
    """Only what applies to a kernel is declared."""
    assert [*bits.CHANGES] == [*INVARIANCES]
    for kernel in KERNELS:
        assert {*kernel.invariant_to} <= {*kernel.invariances}, kernel.name
        assert not kernel.invariant_to or kernel.deterministic, kernel.name
    with pytest.raises(SpecError, match="fwd_mma: invariant_to: 'weather' is not one of runs, entries"):
        dataclasses.replace(registry.get("fwd_mma"), invariant_to=("weather",))


def test_first_difference() -> None:
    """NaN equals NaN; -0 is not +0."""
    zeros, nan = np.zeros((1, 2), np.float32), np.full((1, 2), np.nan, np.float32)
    assert bits.first_difference({"O": nan}, {"O": -nan}) == ""
    assert bits.first_difference({"O": zeros}, {"O": -zeros}) == "O[0, 0] is -0.0, not 0.0; 2 of 2 differ"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["bits", *arguments], catch_exceptions=False)


def test_command(tmp_path: Path) -> None:
    given = ("fwd_minimal", "--backend", "cpu", "--change", "runs", "--change", "cluster", "--seed", "3", "--default")
    rows = json.loads(run(*given, "--json").stdout)
    assert rows["seed"] == 3
    assert [(f["change"], f["equal"], f["declared"]) for f in rows["findings"]] == [
        ("runs", True, True),
        ("cluster", None, False),
    ]
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- bits: written by python -m sandbox bits --page -->\nold\n<!-- end of bits -->\nafter\n"
    )
    shown = run(*given, "--page", str(page))
    assert shown.exit_code == 0
    assert "seed 3, on cpu" in shown.stdout
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("<!-- end of bits -->\nafter\n")
    assert "| `fwd_minimal` | yes |" in text
    assert "old" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fwd_minimal", "block_map"), "block_map is not supported: bits compares rows of attention (choose kernels"),
        (("append_kv",), "append_kv is not supported: bits compares rows of attention"),
        (("fwd_decode", "--invariant"), "fwd_decode: invariant=True is not supported"),
        (("fwd_mma", "--tile", "SUB_N=1"), "fwd_mma: tile SUB_N=1 lacks BLOCK_M, BLOCK_N"),
        (("--seed", "-1"), "Invalid value for '--seed': -1 is not in the range x>=0"),
        (("--page", "no.md"), "Invalid value for '--page': File 'no.md' does not exist"),
        (("--page", __file__), "does not contain the lines <!-- bits"),
    ],
)
def test_usage_errors_precede_the_runs(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bits, "compare", lambda *given: pytest.fail("a kernel was run"))
    done = run(*arguments, "--backend", "cpu")
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
