"""`bits`: the guarantees of the specs, by experiment."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from project import check_stored

from sandbox.cli import cli
from sandbox.core import registry
from sandbox.core.errors import SpecError, UnsupportedProblem
from sandbox.core.kernel import INVARIANCES, Kernel
from sandbox.core.tile import Tile
from sandbox.launch.dlpack import HOST, Device
from sandbox.reference import attention_backward
from sandbox.reference import gather_pages as reference_pages
from sandbox.spec import Problem
from sandbox.verify import bits
from sandbox.verify.sequences import by_sequence, forward

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
    assert [second.what for _, second in pairs] == ["one split instead of 5"]
    assert tried(base.kernel, "splits", invariant=True).equal


def test_keys_behind_the_last_one_with_a_block_map() -> None:
    """V behind the last key is NaN, in a key tile whose first key is in the list of the block map."""
    base = bits.base_of(registry.get("fwd_wgmma_invariant"), HOST, None, 1, True)
    pairs = [*bits.CHANGES["allocation"](base)]
    assert "with a mask" in pairs[-1][1].what
    assert pairs[-1][1].problem.has_block_map
    found = tried(base.kernel, "allocation", invariant=True)
    assert found.equal, found.detail


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


def reference(kernel: Kernel, tile: Tile, p: Problem, inputs: bits.Arrays, device: Device) -> SimpleNamespace:
    """In place of `trial.launch`: the float64 reference."""

    def backward(own: bits.Arrays, options: Any) -> bits.Arrays:
        gradients = attention_backward(own["dO"], own["Q"], own["K"], own["V"], own["O"], own["LSE"], **options)
        return dict(zip(("dQ", "dK", "dV"), gradients, strict=True))

    return SimpleNamespace(outputs=by_sequence(p, inputs, forward if kernel.computes == "forward" else backward))


def nearly(expected: bits.Arrays, found: bits.Arrays) -> str:
    return "" if all(np.allclose(x, found[name], rtol=1e-4, atol=1e-6) for name, x in expected.items()) else "different"


EVERY = [("fwd_minimal", change) for change in registry.get("fwd_minimal").invariances]
EVERY += [("bwd_minimal", change) for change in ("entries", "batch", "heads", "ragged")]
EVERY += [("fwd_decode", change) for change in ("SMs", "splits", "cluster")]


@pytest.mark.parametrize(("name", "change"), EVERY)
def test_the_rows_in_common_have_the_same_exact_result(name: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits.trial, "launch", reference)
    monkeypatch.setattr(bits, "first_difference", nearly)
    found = tried(registry.get(name), change, invariant=False)
    assert found.equal, found.detail


def described(run: bits.Run) -> list[Any]:
    arrays = {name: (x.strides, x.tobytes()) for name, x in run.inputs.items()}
    return [run.problem, run.tile, arrays]


@pytest.mark.parametrize(("name", "change"), [one for one in EVERY if one[1] != "runs"])
def test_the_second_run_differs_from_the_first(name: str, change: str) -> None:
    pairs = [*bits.CHANGES[change](bits.base_of(registry.get(name), HOST, None, 1))]
    assert pairs
    for first, second in pairs:
        assert described(first) != described(second), second.what


@pytest.mark.parametrize(("unsupported", "equal"), [((), True), ((1,), True), ((0,), None), ((0, 1), None)])
def test_a_run_that_is_not_supported_ends_the_comparison(
    unsupported: tuple[int, ...], equal: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pairs before it count; without any, the reason is given."""

    def changed(base: bits.Base) -> Iterator[bits.Pair]:
        for n in range(2):
            run = base.run("", [1])
            problem = dataclasses.replace(run.problem, B=3 if n in unsupported else 2)
            yield run, dataclasses.replace(run, problem=problem)

    def launch(kernel: Kernel, tile: Tile, p: Problem, inputs: bits.Arrays, device: Device) -> SimpleNamespace:
        return SimpleNamespace(outputs={"O": np.zeros(1, np.float32)})

    kernel = dataclasses.replace(
        registry.get("fwd_minimal"), supports=lambda p, arch: "B=3 is not supported" if p.B == 3 else None
    )
    monkeypatch.setitem(bits.CHANGES, "runs", changed)
    monkeypatch.setattr(bits.trial, "launch", launch)
    found = bits.compare(bits.base_of(kernel, HOST, None, 1), "runs", HOST)
    assert found.equal is equal
    assert found.detail == ("" if equal else "fwd_minimal: B=3 is not supported")


MODES = [(name, invariant) for name in ("fwd_mma", "fwd_minimal") for invariant in (False, True)]


@pytest.mark.parametrize("refused", [None, *MODES])
def test_what_a_gpu_does_not_support_is_left_out(
    refused: tuple[str, bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def base_of(kernel: Kernel, device: Device, tile: Tile | None, seed: int, invariant: bool) -> tuple[str, bool]:
        if (kernel.name, invariant) == refused:
            raise UnsupportedProblem(f"{kernel.name} is not supported")
        return kernel.name, invariant

    monkeypatch.setattr(bits, "base_of", base_of)
    monkeypatch.setattr(bits, "compare", lambda base, change, device: base)
    kernels = [registry.get(name) for name in ("fwd_mma", "fwd_minimal")]
    found = [*bits.examine(kernels, ("cuda", 0), 1, None, ["runs"])]
    assert found == [mode for mode in MODES if mode != refused]


def test_page_sizes_are_those_that_tma_supports() -> None:
    kernel = registry.get("fwd_wgmma")
    runs = [run for pair in bits.CHANGES["page_size"](bits.base_of(kernel, HOST, None, 1)) for run in pair]
    assert len({run.problem.page_size for run in runs}) == 3
    assert [kernel.why_unsupported(run.problem) for run in runs] == [None] * len(runs)


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


# ---- the runs, and the tables of their results


def shown(run: bits.Run) -> str:
    """A run, with a number for its inputs and their strides."""
    inputs = [f"{name} {x.dtype} {x.shape} {x.strides}".encode() + x.tobytes() for name, x in run.inputs.items()]
    digest = hashlib.sha256(b"".join(inputs)).hexdigest()[:12]
    return f"  {run.what or '-'} | {run.problem} aligned to {run.problem.alignment} | {dict(run.tile)} | {digest}"


def test_stored_runs() -> None:
    """Every run of a change, with its inputs. A problem on the CPU backend is smaller than one on a GPU."""
    kernel = registry.get("fwd_decode")
    base = bits.base_of(kernel, HOST, None, 1)
    lines = [f"{base.problem} {base.tile}"]
    for change, runs in bits.CHANGES.items():
        lines += [change, *(shown(run) for pair in runs(base) for run in pair)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bits.pipeline, "tile_on", lambda *given: kernel.tiles[0])
        lines.append(str(bits.base_of(kernel, ("cuda", 0), None, 1).problem))
    check_stored("bits.txt", lines)


def test_keys_in_pages() -> None:
    """The pages are in random order. block_table has a page more than the keys need; some pages are in no table."""
    base = bits.base_of(registry.get("fwd_minimal"), HOST, None, 1)
    dense = base.run("", [0, 1])
    paged = bits._in_pages(dense, 64, np.random.default_rng(0), "pages")
    p, table = paged.problem, paged.inputs["block_table"]
    assert (p.Sk, p.page_size, p.pages, p.key_lengths) == (7 * 64, 64, 17, True)
    assert table.shape == (2, 7)
    assert len({*table.flat}) == 14
    assert (np.sort(table.ravel()) != table.ravel()).any()
    assert paged.inputs["key_lengths"].tolist() == [333, 333]
    for name in ("K", "V"):
        gathered = reference_pages(paged.inputs[name].swapaxes(1, 2), table, paged.inputs["key_lengths"])
        np.testing.assert_array_equal(gathered[:, :, :333], dense.inputs[name])


def test_a_mask_that_hides_half_of_the_keys() -> None:
    base = bits.base_of(registry.get("fwd_minimal"), HOST, None, 1)
    mask = bits._masked(base.run("", [1]), np.random.default_rng(0)).inputs["mask"]
    assert mask.shape == (1, 1, 150, 333)
    assert not mask[..., :166].any()
    assert 0.75 < mask[..., 166:].mean() < 0.85
    assert mask[..., 166].any()


def test_scores_of_a_problem_grow_along_the_keys() -> None:
    base = bits.base_of(registry.get("fwd_minimal"), HOST, None, 1)
    size = {name: abs(x.astype(np.float32)).mean((0, 1, 3)) for name, x in base.arrays.items()}
    assert size["K"][-20:].mean() / size["K"][:20].mean() == pytest.approx(1.95 / 0.25, rel=0.15)
    assert size["Q"].mean() / size["V"].mean() == pytest.approx(3, rel=0.05)


def test_a_tile_that_is_given_is_used() -> None:
    tile = Tile(BLOCK_M=64, BLOCK_N=16)
    assert bits.base_of(registry.get("fwd_minimal"), HOST, tile, 1).tile == tile
    refusing = dataclasses.replace(registry.get("fwd_minimal"), supports=lambda p, arch: f"D={p.D} is refused")
    with pytest.raises(UnsupportedProblem, match="D=64 is refused"):  # the first of the reasons
        bits.base_of(refusing, HOST, None, 1)


@pytest.mark.parametrize("invariant", [False, True])
def test_what_a_run_launches(invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With invariant=True the tile is chosen again for each problem; numbers of the run replace its own. A run that was
    launched before is not launched again."""
    launched: list[Any] = []

    def launch(kernel: Kernel, tile: Tile, p: Problem, inputs: bits.Arrays, device: Device) -> SimpleNamespace:
        launched.append(tile)
        return SimpleNamespace(outputs={"O": np.zeros((2, 4, 150, 64), np.float32)})

    chosen = Tile(BLOCK_M=128, BLOCK_N=16)
    base = bits.base_of(registry.get("fwd_minimal"), HOST, Tile(BLOCK_M=64, BLOCK_N=64), 1)
    base = dataclasses.replace(base, problem=dataclasses.replace(base.problem, invariant=invariant))
    monkeypatch.setattr(bits.trial, "launch", launch)
    monkeypatch.setattr(bits.pipeline, "tile_on", lambda *given: chosen)
    run = dataclasses.replace(base.run("", [0, 1]), tile={"BLOCK_N": 32}, rows=lambda name, x: x[1:])
    done: dict[int, bits.Arrays] = {}
    for _ in range(2):
        assert bits._launched(base, run, HOST, done)["O"].shape == (1, 4, 150, 64)
    assert launched == [Tile(BLOCK_M=128 if invariant else 64, BLOCK_N=32)]
    refused = dataclasses.replace(run, tile={"BLOCK_N": 4096})
    with pytest.raises(UnsupportedProblem, match="BLOCK_N=4096"):
        bits._launched(base, refused, HOST, done)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("fwd_minimal", registry.get("fwd_minimal").invariances), ("bwd_minimal", ("runs", "entries", "batch", "ragged"))],
)
def test_changes_that_are_guaranteed_with_invariant(name: str, expected: tuple[str, ...]) -> None:
    assert bits.guaranteed(registry.get(name)) == expected


def finding(kernel: str, change: str, equal: bool | None, declared: bool, invariant: bool = False) -> bits.Finding:
    return bits.Finding(kernel, Tile(BLOCK_M=64), invariant, change, equal, declared, "O[0] is 1, not 2")


FINDINGS = [
    finding("k", "runs", True, True), finding("k", "batch", True, False), finding("k", "heads", False, False),
    finding("k", "queries", False, True), finding("k", "pages", None, True), finding("k", "runs", True, True, True),
    finding("other", "strides", True, True),
]  # fmt: skip
CELLS = [
    ["k", "yes", "", "(yes)", "no", "BROKEN", "", "-", "", "", "", "", "", ""],
    ["k, invariant", "yes", *[""] * 12],
    ["other", *[""] * 12, "yes"],
]


def test_the_table_of_findings() -> None:
    table = bits.table_of(FINDINGS)
    assert [column.header for column in table.columns] == ["kernel", *INVARIANCES]
    assert [[*row] for row in zip(*(column.cells for column in table.columns), strict=True)] == CELLS
    assert [f.violated for f in FINDINGS] == [False, False, False, True, False, False, False]
    assert bits.sentence(FINDINGS[3]) == "BROKEN k, queries: O[0] is 1, not 2"
    assert bits.sentence(FINDINGS[5]) == "k with invariant=True, runs: O[0] is 1, not 2"


def test_the_page_of_findings(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{bits._BEGIN}old\n{bits._END}\nafter\n")
    bits.write_page(page, FINDINGS, 7, HOST)
    body = page.read_text().removeprefix(f"before\n{bits._BEGIN}").removesuffix(f"{bits._END}\nafter\n").splitlines()
    assert body[:2] == ["| kernel | " + " | ".join(INVARIANCES) + " |", "| --- |" + " --- |" * len(INVARIANCES)]
    assert body[2:-2] == [f"| `{name}` |" + "".join(f" {cell} |" for cell in cells) for name, *cells in CELLS]
    assert body[-2:] == ["", f"{bits.LEGEND}. Measured on the CPU backend, seed 7."]


def test_the_first_output_that_differs() -> None:
    a = {"O": np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), "LSE": np.array([5.0, 6.0], np.float32)}
    b = {"O": a["O"].copy(), "LSE": np.array([5.0, 7.0], np.float32)}
    assert bits.first_difference(a, b) == "LSE[1] is 7.0, not 6.0; 1 of 2 differ"
    b["O"][1] = [0.5, np.nan]
    assert bits.first_difference(a, b) == "O[1, 0] is 0.5, not 3.0; 2 of 4 differ"
    assert bits.first_difference({"O": a["O"].astype(np.float16).T}, {"O": b["O"].astype(np.float16).T}) == (
        "O[0, 1] is 0.5, not 3.0; 2 of 4 differ"
    )


@pytest.mark.parametrize("tile", [None, Tile(BLOCK_M=64, BLOCK_N=32)])
def test_a_kernel_that_the_cpu_backend_refuses(tile: Tile | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error; with a tile only if no kernel takes it."""

    def base_of(kernel: Kernel, *given: Any) -> Kernel:
        if kernel.name == "fwd_mma":
            raise UnsupportedProblem("fwd_mma is not supported")
        return kernel

    monkeypatch.setattr(bits, "base_of", base_of)
    monkeypatch.setattr(bits, "compare", lambda base, change, device: base.name)
    both = [registry.get(name) for name in ("fwd_mma", "fwd_minimal")]
    for kernels in (both, both[:1]):
        if tile and len(kernels) == 2:
            assert [*bits.examine(kernels, HOST, 1, tile, ["runs"], invariant=False)] == ["fwd_minimal"]
        else:
            with pytest.raises(UnsupportedProblem, match="fwd_mma is not supported"):
                list(bits.examine(kernels, HOST, 1, tile, ["runs"], invariant=False))


@pytest.mark.parametrize("invariant", [None, False, True])
def test_only_one_of_the_modes(invariant: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "base_of", lambda *given: given[-1])
    monkeypatch.setattr(bits, "compare", lambda base, change, device: (base, change))
    found = [*bits.examine([registry.get("fwd_mma")], HOST, 1, invariant=invariant)]
    modes = [False, True] if invariant is None else [invariant]
    assert found == [(mode, change) for mode in modes for change in bits.CHANGES]
