"""Test inputs of score options in `check` and `bench`, and their references."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from project import check_stored, digest, is_stored

from sandbox import reference
from sandbox.core import registry
from sandbox.core.errors import CompileError, SpecError, ToolchainMissing
from sandbox.cpu import compiler
from sandbox.cpu.launch import CpuFunction
from sandbox.engine import pipeline
from sandbox.engine.choose import choose_tile, why_tile_unsupported
from sandbox.launch.dlpack import HOST
from sandbox.launch.host import host_array
from sandbox.spec import Problem, Score
from sandbox.toolchain import cache, nvrtc
from sandbox.verify import cases, sampled, scores, sequences
from sandbox.verify.cases import Case, inputs_of, sweep_cases
from sandbox.verify.isolated import IsolatedRunner
from sandbox.verify.references import reference_of
from sandbox.verify.sampled import expect_sequences
from sandbox.verify.suite import suite_of

TRIED = (*((name,) for name in scores.OPTIONS), *scores.TOGETHER)
P = Problem(2, 4, 130, 97, 8, Hk=2, dtype="float32", causal="bottom-right")


def problem(names: tuple[str, ...], p: Problem = P) -> Problem:
    for name in names:
        p = dataclasses.replace(p, **scores.OPTIONS[name](p))
    return p


def tensors(given: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in given.items()}


@pytest.mark.parametrize("names", [names for names in TRIED if not {*names} & {"score", "all dropped"}], ids=" + ".join)
@pytest.mark.parametrize("causal", [False, "bottom-right", "top-left"])
def test_the_pairs_that_are_seen(names: tuple[str, ...], causal) -> None:
    """Counted if they depend on the content of a tensor; otherwise computed from the problem."""
    p = problem(names, dataclasses.replace(P, Sq=300, causal=causal))
    given = scores.score_inputs(p)
    found, whole = scores.visible_pairs(p, tensors(given)), int(scores.visible_keys(p, given).sum())
    hidden = {*names} & {"mask", "padding", "key_lengths"}
    assert found == (whole if hidden else None)
    if hidden:
        assert 0 < p.flops_of("forward", found) == 2 * whole * (p.D + p.Dv)
        assert 2 * p.flops_of("backward", found) == 2 * 2 * whole * (3 * p.D + 2 * p.Dv)
    else:
        assert whole == p.B * p.H * p.visible_pairs


@pytest.mark.parametrize("names", TRIED, ids=" + ".join)
def test_strips_are_those_of_the_whole(names: tuple[str, ...]) -> None:
    p = problem(names)
    given = inputs_of("backward", Case("strips", p))
    options = scores.reference_options(p, given)
    out, lse = reference.attention(given["Q"], given["K"], given["V"], **options)
    t = tensors(given)
    read = {name: t[name] for name in scores.score_inputs(p)}
    expected = sampled.expect(p, t["Q"], t["K"], t["V"], option_tensors=read)
    assert len(expected.strips) > 1
    for strip in expected.strips:
        for n, (b, h) in enumerate(expected.heads):
            np.testing.assert_allclose(strip.out[n, 0], out[b, h, strip.start : strip.stop], atol=1e-12)
            np.testing.assert_allclose(strip.lse[n, 0], lse[b, h, strip.start : strip.stop], atol=1e-12)
    assert sampled.compare(expected, *(torch.from_numpy(x.astype(np.float32)) for x in (out, lse))).message == ""
    wrong, _ = reference.attention(given["Q"], given["K"], given["V"], causal=p.causal, scale=p.scale)
    if names != ("Dv",):
        assert sampled.compare(expected, torch.from_numpy(wrong.astype(np.float32))).message
    gradients = sampled.expect_gradients(p, t["Q"], t["K"], t["V"], t["dO"], option_tensors=read)

    def launch() -> tuple[Any, ...]:
        found = reference.attention_backward(*(t[n].numpy() for n in ("dO", "Q", "K", "V")), **options)
        return tuple(torch.from_numpy(x) for x in found)

    assert gradients.check(lambda: None, launch).message == ""


def test_sampled_sequences_know_their_numbers() -> None:
    """Dropout depends on the index of a sequence in its batch."""
    lengths = ((90, 40), (0, 3), (30, 70), (5, 5))
    p = Problem(0, 2, 0, 0, 16, Hk=1, lengths=lengths, dropout=0.3, causal="bottom-right")
    given = inputs_of("backward", Case("sequences", p))
    t = tensors(given)
    read = {name: t[name] for name in (*scores.score_inputs(p), "cu_seqlens_q", "cu_seqlens_k")}

    def backward(own: Any, options: Any) -> dict[str, Any]:
        found = reference.attention_backward(*(own[name] for name in ("dO", "Q", "K", "V")), **options)
        return dict(zip(("dQ", "dK", "dV"), found, strict=True))

    for computes, compute in (("forward", sequences.forward), ("backward", backward)):
        inputs = tuple(t[name] for name in ("Q", "K", "V", "dO")[: 3 + (computes == "backward")])
        expected = expect_sequences(p, inputs, computes, read)
        for seed, right in ((given["seed"], True), (given["seed"] + 1, False)):

            def launch(seed: Any = seed, compute: Any = compute) -> tuple[Any, ...]:
                results = sequences.by_sequence(p, {**given, "seed": seed}, compute)
                return tuple(torch.from_numpy(x) for x in results.values())

            assert (expected.check(lambda: None, launch).message == "") is right, computes


@pytest.mark.parametrize("kernel", registry.kernels().values(), ids=lambda kernel: kernel.name)
def test_the_sweep_tries_every_option(kernel) -> None:
    """The options that the kernel supports: most kernels support all, those for plain problems none."""
    found = [
        case
        for case in sweep_cases(kernel)
        if not (case.problem.plain or case.problem.ragged or case.problem.page_size)
    ]
    wide = kernel.adapted(dataclasses.replace(P, D=64, Dv=64, dtype=kernel.dtypes[0]))
    takes = {name for name in scores.OPTIONS if kernel.why_unsupported(problem((name,), wide)) is None}
    if not takes:
        assert not found
        return
    of_float8 = [case for case in found if case.name.startswith("float8: ")]
    assert len(of_float8) == (2 * len(scores.OF_FLOAT8) if "float8_e4m3" in kernel.dtypes else 0)
    of_float8_keys = [case for case in found if case.name.startswith("float8 keys: ")]
    assert len(of_float8_keys) == (len(scores.OF_FLOAT8_KEYS) if kernel.float8_keys else 0)
    assert len(found) - len(of_float8) - len(of_float8_keys) == sum(takes.issuperset(names) for names in TRIED)
    assert {case.inputs for case in found} == {"normal", "hidden", "large"} or len(takes) < len(scores.OPTIONS) / 2
    assert {case.problem.dtype for case in found} == {*kernel.dtypes}


@pytest.mark.parametrize("name", [name for name in registry.kernels() if is_stored(f"cases/{name}.txt")])
def test_stored_cases(name: str) -> None:
    """What the commands run by default: problem, inputs and layout of every case, without the cases of options, which
    follow from their table."""
    kernel = registry.get(name)
    suite = suite_of(kernel)
    arch = kernel.min_arch
    groups: dict[str, list[Any]] = {
        "run": [*suite.named_cases(kernel, small=True), *suite.named_cases(kernel, small=False)],
        "watch": [*suite.quick_cases(kernel, HOST), *suite.quick_cases(kernel, ("cuda", 0))],
        "tiles": [suite.tile_case(kernel, tile) for tile in kernel.tiles],
        "sanitize": [*suite.small_problems(kernel, kernel.tiles[-1]), *suite.shipped_tiles(kernel, arch)],
        "check": [*suite.sweep_cases(kernel)],
    }
    lines = []
    for group, found in groups.items():
        texts = [shown(case) for case in found if group != "check" or case.problem.plain]
        lines += [f"{group} {text}"[:160] for text in (*texts[:1], *texts[-1:])]
        lines.append(f"{group}: {digest(texts)}")
    check_stored(f"cases/{name}.txt", lines)


@pytest.mark.parametrize("name", [name for name in registry.kernels() if is_stored(f"cases/{name}.txt")])
def test_tiles_support_the_problems_that_are_sanitized(name: str) -> None:
    kernel = registry.get(name)
    pairs = suite_of(kernel).shipped_tiles(kernel, kernel.min_arch)
    assert pairs
    for tile, problem in pairs:
        assert not why_tile_unsupported(kernel, problem, tile, kernel.min_arch)


@pytest.mark.parametrize("widths", [{128}, set()])
def test_sweeps_of_kernels_with_few_head_dimensions(widths: set[int]) -> None:
    """No small one, or none: a kernel for pages alone."""

    def supports(p: Problem, arch: Any) -> str | None:
        return None if p.D in widths or p.page_size else f"D={p.D} is not supported"

    few = dataclasses.replace(registry.get("fwd_mma"), supports=supports)
    plain = [case.problem for case in sweep_cases(few) if case.problem.plain]
    assert {p.D for p in plain} == widths


def shown(case: Any) -> str:
    if isinstance(case, Case):
        return f"{case.name} | {case.problem} | {case.inputs} {case.layout}"
    return " ".join(map(str, case)) if isinstance(case, tuple) else str(case)


def test_stored_inputs() -> None:
    """Each kind of inputs and each memory layout, of numbers that are given."""
    lines = []
    for name, change in cases.INPUTS.items():
        q, k, v = (np.linspace(-3, n, 2 * 97 * 8, dtype=np.float32).reshape(1, 2, 97, 8) for n in (1, 2, 3))
        change(q, k, v)
        lines.append(f"{name} {[hashlib.sha256(x.tobytes()).hexdigest()[:12] for x in (q, k, v)]}")
    for name, lay_out in cases.LAYOUTS.items():
        for dtype in (np.float32, np.float16, ml_dtypes.float8_e4m3fn):
            x = lay_out(np.arange(2 * 3 * 5 * 8).reshape(2, 3, 5, 8).astype(dtype))
            lines.append(f"{name} {x.dtype} {x.shape} {x.strides} {x.astype(np.float64).sum()}")
    check_stored("inputs.txt", lines)


def test_hidden_elements_are_nan() -> None:
    p = problem(("bias", "mask", "key_lengths"))
    given = inputs_of("backward", Case("hidden", p, "hidden"))
    seen = scores.visible_keys(p, given)
    for name in ("K", "V", "bias"):
        assert np.isnan(given[name].astype(np.float32)).any()
    assert not seen[1].any()  # a batch entry in which no key counts
    assert not given["O"][1].any()
    assert np.isneginf(given["LSE"][1]).all()
    assert np.isfinite(given["O"]).all()


def test_a_score_without_numbers_reads_its_file_again(tmp_path) -> None:
    file = tmp_path / "slopes.py"
    file.write_text(
        "import numpy as np\nimport sandbox\n\n\ndef score(problem):\n"
        "    return sandbox.Score('x - s(h) * abs(i - j)', tensors={'s': np.arange(problem.H, dtype=np.float32)})\n"
    )
    p = dataclasses.replace(P, score=Score.from_file(file, P))
    again = Problem.from_json(p.as_json())
    assert again == p
    assert (scores.score_inputs(again)["score.s"] == np.arange(4)).all()
    np.testing.assert_array_equal(
        *(inputs_of("backward", Case("file", q))["O"] for q in (p, again)),
    )
    file.write_text("score = 3\n")
    with pytest.raises(SpecError, match="it must define score"):
        Score.from_file(file, P)
    with pytest.raises(SpecError, match="there is no such file"):
        Score.from_file(tmp_path / "none.py", P)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sandbox\nscore = sandbox.Score('x'", "line 2: SyntaxError: '\\(' was never closed"),
        ("import no_such_module\n", "line 1: ModuleNotFoundError: "),
        ("def score(problem):\n    return problem.heads\n", "line 2: AttributeError: "),
        ("import sys\nsys.exit('no such score')\n", "line 2: SystemExit: no such score: exit would end the program"),
        ("def score(problem):\n    exit(4)\n", "line 2: SystemExit: 4: exit would end the program"),
        ("import sandbox\nscore = sandbox.Score('x', tensors={'for': 1})\n", "cannot be called 'for'"),
    ],
)
def test_a_file_of_a_score_that_is_wrong_says_where(text: str, said: str, tmp_path) -> None:
    (tmp_path / "score.py").write_text(text)
    with pytest.raises(SpecError, match=rf"score\.py.* {said}"):
        Score.from_file(tmp_path / "score.py", P)


def test_the_cache_is_not_cleared_before_an_expression_is_loaded(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clearing: list[threading.Thread] = []
    loaded = CpuFunction.__init__

    def loading(self: CpuFunction, *arguments: Any) -> None:
        clearing.append(threading.Thread(target=cache.clear))
        clearing[-1].start()
        clearing[-1].join(0.3)
        loaded(self, *arguments)

    monkeypatch.setattr(CpuFunction, "__init__", loading)
    value, _, _ = Score("x + 0.125f").evaluate(X, 0, 0, I, J, 7, 5)
    (thread,) = clearing
    thread.join()
    assert (value == X + 0.125).all()
    assert list(cache.entries()) == []


def test_an_expression_that_does_not_compile_is_a_result() -> None:
    """Like a compile error of a kernel; the process survives."""
    p = dataclasses.replace(P, score=Score("x - slop(h)"))
    with IsolatedRunner(print) as runner:
        found = runner.verify(registry.get("fwd_minimal"), Case("typo", p), HOST)
    assert found.ok is False
    assert found.message.startswith("Score: x - slop(h) does not compile: ")


TABLE = {"t": np.zeros((130, 97), np.float32)}
# what is wrong: score, mask, and of each mistake (where it is, the line up to the place that the host compiler means)
MISTAKES = {
    "a name": (Score("x - 0.5 * slop(h) * .25"), [("score", "x - 0.5 * ")]),
    "a name in the condition": (Score("x", "j <= q"), [("mask", "j <= ")]),
    "one in each": (Score("y", "j <= q"), [("score", ""), ("mask", "j <= ")]),
    "its end": (Score("x\n - 0.1 * abs(i - j) *"), [("score, line 2", " - 0.1 * abs(i - j) *")]),
    "an increment": (Score("x + i++"), [("score", "x + ")]),
    "a line": (Score("x\n + 1.5 * 2.5 * nothing"), [("score, line 2", " + 1.5 * 2.5 * ")]),
    "types": (Score('x + "ab"'), [("score", "x ")]),
    "indices": (Score("x + t(i)", tensors=TABLE), [("score", "x + t")]),
}


def located(message: str, score: Score) -> list[tuple[str, str]]:
    """The location of each mistake in a message about `score`, and the line up to the caret below it."""
    assert message.startswith(f"Score: {' '.join(str(score).split())} does not compile: ")
    assert "score_mod.cuh" not in message
    assert "dual.cuh" not in message
    lines = message.splitlines()
    found = [(n, *line[2:].split(": ", 1)) for n, line in enumerate(lines) if line.startswith(("  score", "  mask"))]
    carets = [lines[n + 1].index("^") - len(where) - 4 if "^" in lines[n + 1] else 0 for n, where, _ in found]
    return [(where, text[:caret]) for (_, where, text), caret in zip(found, carets, strict=True)]


@pytest.mark.parametrize(
    ("score", "hint"),
    [
        (Score(mask="x > 0"), "\nmask may use b, h, i, j, Sq, Sk, and call exp, "),
        (
            Score("sin(x) * t(j, 0)", tensors=TABLE),
            ", Sk, t(index, index) (index: an integer expression without x), and call exp, log, ",
        ),
        (Score("x + t", tensors=TABLE), "tensor without an index"),
        (Score("x ? 1 : 2"), "; where(condition, a, b) replaces ?:\n"),
    ],
    ids=["mask", "function", "index", "condition"],
)
def test_a_mistake_in_a_score_names_what_is_allowed(score: Score, hint: str) -> None:
    with pytest.raises(CompileError) as caught:
        score.evaluate(X, 0, 0, I, J, 7, 5)
    assert hint in str(caught.value)
    assert not any(name in str(caught.value) for name in ("Dual", "SnippetTensor"))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_score_is_told_by_its_own_line(mistake: str) -> None:
    """Not by lines of included headers. For the host compiler and NVRTC."""
    score, expected = MISTAKES[mistake]
    if "Clang" in compiler.find().identity or "clang" in compiler.find().identity:
        pytest.skip("Clang means other columns")
    with pytest.raises(CompileError) as refused:
        score.evaluate(np.zeros((2, 2)), 0, 0, np.zeros((2, 1), int), np.zeros((1, 2), int), 130, 97)
    assert located(str(refused.value), score) == expected
    assert str(refused.value).endswith("\n(reported by g++)")
    assert "error: " in refused.value.log
    try:
        nvrtc.version()
    except ToolchainMissing as missing:
        pytest.skip(str(missing))
    kernel, p = registry.get("fwd_minimal"), dataclasses.replace(P, score=score)
    with pytest.raises(CompileError, match="NVRTC") as refused:
        pipeline.compile_problem(kernel, p, choose_tile(kernel, p, None), "sm_90a")
    found = located(str(refused.value), score)
    assert {where for where, _ in found} == {where for where, _ in expected}
    if mistake not in ("types", "indices"):  # NVRTC reports another part of these, or no location
        assert found == expected


def test_a_mistake_of_the_kernel_is_not_the_scores(tmp_path) -> None:
    """A mistake in both expressions is shown as reported by the compiler."""
    kernel = registry.get("fwd_minimal")
    source = tmp_path / "fwd_minimal.cu"
    source.write_text(kernel.source.read_text().replace("float m = -INF", "float m = -INFF"))
    broken, p = dataclasses.replace(kernel, source=source), dataclasses.replace(P, score=Score("x - slop(h)"))
    for score in (p.score, Score("x")):
        with pytest.raises(CompileError, match=f"refused {source}") as refused:
            pipeline.load(broken, choose_tile(kernel, p, None), dataclasses.replace(p, score=score), HOST)
        assert "INFF" in str(refused.value)


def test_operations_of_hidden_pairs_do_not_count() -> None:
    """With the inputs; without them, by convention, all pairs count."""
    problem = Problem(1, 2, 8, 12, 16, mask=(1, 1, 8, 12))
    mask = np.arange(8 * 12).reshape(1, 1, 8, 12) % 3 == 0
    suite = suite_of(registry.get("fwd_minimal"))
    assert suite.flops(problem) == 4 * 2 * 8 * 12 * 16
    assert suite.flops(problem, {"mask": mask}) == 4 * 2 * 8 * 4 * 16


X, I, J = np.linspace(-2, 2, 20).reshape(4, 5), np.arange(3, 7)[:, None], np.arange(5)[None]


@pytest.mark.parametrize(
    ("expression", "value", "derivative"),
    [
        ("x", lambda x: x, lambda x: x**0),
        ("exp(x) - log(2 + x * x)", lambda x: np.exp(x) - np.log(2 + x**2), lambda x: np.exp(x) - 2 * x / (2 + x**2)),
        ("tanh(x / 3)", lambda x: np.tanh(x / 3), lambda x: (1 - np.tanh(x / 3) ** 2) / 3),
        ("abs(x) + max(x, 0.5)", lambda x: abs(x) + np.maximum(x, 0.5), lambda x: np.sign(x) + (x > 0.5)),
        ("where(j > i - 4, x * x, 0) + min(i, j)", lambda x: np.where(J > I - 4, x**2, 0) + np.minimum(I, J),
         lambda x: np.where(J > I - 4, 2 * x, 0)),
        ("x * (b + 10 * h) + Sq - Sk", lambda x: x * 21 - 2, lambda x: 0 * x + 21),
    ],
)  # fmt: skip
def test_expressions_and_their_derivatives_on_the_host(expression: str, value: Any, derivative: Any) -> None:
    found = Score(expression, mask="(i + j) % 2 == 0 && i < Sq").evaluate(X, 1, 2, I, J, 5, 7)
    np.testing.assert_allclose(found[0], value(X), atol=1e-14)
    np.testing.assert_allclose(found[1], derivative(X), atol=1e-14)
    np.testing.assert_array_equal(found[2], ((I + J) % 2 == 0) & (I < 5))


def test_tensors_of_every_kind_on_the_host() -> None:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((3, 9, 12)).astype(np.float16)[:, ::2, ::-2]  # strides of its own
    narrow = rng.standard_normal((9, 3)).astype(ml_dtypes.bfloat16)
    half = torch.from_numpy(narrow.astype(np.float32)).bfloat16()
    score = Score(
        "table(b, min(i, 4), j) + narrow(i, h) + whole(j)",
        mask="flag(i, j)",
        tensors={
            "table": table, "narrow": half, "whole": np.arange(6, dtype=np.int32),
            "flag": torch.ones(7, 5, dtype=torch.bool),
        },
    )  # fmt: skip
    value, derivative, seen = score.evaluate(X, 1, 2, I, J, 7, 5)
    assert host_array(half).dtype == ml_dtypes.bfloat16
    wanted = table[1][np.minimum(I, 4), J].astype(float) + narrow[I, 2].astype(float) + J
    np.testing.assert_allclose(value, wanted, atol=1e-12)
    assert not derivative.any()
    assert seen.all()


@pytest.mark.parametrize("Sq", [1, 7, 50])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_sinks_gradient_that_lacks_a_row(dtype: str, Sq: int) -> None:
    """dsink is one number for all rows, for which plain attention may happen to be exact. The bound allows the rounding
    of O, but not a missing row."""
    case = Case("sink", Problem(2, 1, Sq, 130, 64, dtype=dtype, causal="top-left", sink=True))
    expected = reference_of("backward", case)
    dO, O, LSE = (expected.inputs[name].astype(np.float32) for name in ("dO", "O", "LSE"))
    rows = -np.exp(expected.inputs["sink"][0] - LSE) * (dO * O).sum(axis=3)
    right, bound = expected.outputs["dsink"].values, expected.outputs["dsink"].bound
    assert reference.max_error([rows.sum()], right) <= bound
    caught = [reference.max_error([rows.sum() - row], right) > bound for row in rows.flat]
    assert np.mean(caught) > 0.9


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize("lengths", [False, True])
def test_pairs_of_masks_that_heads_and_batch_entries_share(shape: tuple[int, int], lengths: bool) -> None:
    """Those of a mask that differs between heads are counted for each."""
    p = dataclasses.replace(P, Sq=5, Sk=7, causal=False, mask=(*shape, 5, 7), key_lengths=lengths)
    share = np.linspace(0.2, 0.9, shape[0] * shape[1]).reshape(*shape, 1, 1)
    mask = np.random.default_rng(0).random((*shape, 5, 7)) < share
    given: dict[str, Any] = {"mask": mask}
    seen = np.broadcast_to(mask, (2, 4, 5, 7))
    if lengths:
        given["key_lengths"] = np.array([7, 3], np.int32)
        seen = seen & (np.arange(7) < given["key_lengths"][:, None, None, None])
    assert scores.visible_pairs(p, given) == seen.sum()


def test_pairs_of_no_heads_or_batch_entries() -> None:
    p = dataclasses.replace(P, B=0, mask=(1, 1, 130, 97))
    assert scores.visible_pairs(p, {"mask": np.ones((1, 1, 130, 97), bool)}) == 0


@pytest.mark.parametrize("name", ["K", "V"])
def test_only_keys_that_no_query_sees_are_nan(name: str) -> None:
    """Of any query head of the group."""
    p = dataclasses.replace(P, causal=False, mask=(2, 4, 130, 97))
    mask = np.zeros((2, 4, 130, 97), bool)
    mask[:, :, :, 5:] = True
    mask[0, 1, 17, 2] = True  # key 2 of key head 0
    inputs = {"K": np.ones((2, 2, 97, 8), np.float32), "V": np.ones((2, 2, 97, 8), np.float32), "mask": mask}
    scores.fill_hidden_with_nan(p, inputs)
    hidden = np.zeros((2, 2, 97), bool)
    hidden[:, :, :5] = True
    hidden[0, 0, 2] = False
    np.testing.assert_array_equal(np.isnan(inputs[name]), np.broadcast_to(hidden[..., None], (2, 2, 97, 8)))


@pytest.mark.parametrize("shape", [(1, 1, 5, 7), (2, 1, 5, 1), (1, 4, 1, 7)])
def test_only_elements_of_a_bias_that_no_query_reads_are_nan(shape: tuple[int, ...]) -> None:
    p = dataclasses.replace(P, Sq=5, Sk=7, causal="top-left", bias=shape)
    inputs = {name: np.ones((2, 2, 7, 8), np.float32) for name in "KV"} | {"bias": np.ones(shape, np.float32)}
    scores.fill_hidden_with_nan(p, inputs)
    seen = np.broadcast_to(np.tril(np.ones((5, 7), bool)), (2, 4, 5, 7))
    read = seen.any(axis=tuple(axis for axis, n in enumerate(shape) if n == 1), keepdims=True)
    np.testing.assert_array_equal(np.isnan(inputs["bias"]), ~read)


def test_values_of_a_scores_tensors() -> None:
    """Booleans, indices that are valid, and small numbers."""
    found = scores.score_inputs(dataclasses.replace(P, score=scores.documents(P)))
    gain, near, doc, every = (found[f"score.{name}"] for name in ("gain", "near", "doc", "every"))
    assert [x.dtype.name for x in (gain, near, doc, every)] == ["float32", "float16", "int32", "bool"]
    assert {*doc.flat} == {0, 1, 2}
    assert 0.05 < every.mean() < 0.35
    assert 0.3 < near.astype(float).std() < 0.7


def test_descales_of_a_problem() -> None:
    p = dataclasses.replace(P, dtype="float8_e4m3", descale=((2, 4), 0.5, (1, 2)))
    found = scores.score_inputs(p)
    assert [*found] == ["descale_q", "descale_v"]
    assert (found["descale_q"].shape, found["descale_v"].shape) == ((2, 4), (1, 2))
    for x in found.values():
        assert (x.min() >= 0.5, x.max() <= 1.5, x.dtype) == (True, True, np.float32)
    assert (scores.score_inputs(p, seed=1)["descale_q"] != found["descale_q"]).all()
