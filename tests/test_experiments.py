"""The experiments that people run again: small runs of them, so that they do not rot."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from project import INTERRUPTIBLE, leave_process_group

import sandbox
from sandbox.launch.dlpack import HOST, Device
from sandbox.verify import check
from sandbox.verify.cases import Case

pytest.importorskip("matplotlib")
torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parent.parent
# From the thread in which PyTorch differentiates, at its first matrix product on a GPU.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")


def load(experiment: str, module: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of an experiment, whose folder is the first that imports look into, as when its run.py is started."""
    folder = ROOT / "experiments" / experiment
    monkeypatch.syspath_prepend(folder)
    for file in folder.glob("*.py"):
        monkeypatch.delitem(sys.modules, file.stem, raising=False)  # another experiment's of that name
    return importlib.import_module(module)


def read(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_an_older_state_of_the_hopper_backward(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another commit's folder is a contender of its own name; here, a copy of this one's. What is timed is there."""
    beside = load("013_hopper_backward", "beside", monkeypatch)
    shutil.copytree(ROOT / "kernels_cu", tmp_path / "kernels_cu")
    kernel = beside.older("copy", tmp_path / "kernels_cu")
    assert [entry.name for entry in kernel.entries] == ["bwd_copy", "bwd_copy_pieces", "bwd_copy_dq"]
    case = Case("copy", sandbox.Problem(1, 1, 70, 70, 64, dtype="float16"))
    assert check.verify(kernel, case, HOST).ok
    assert [len(beside.problems(stage)) for stage in beside.STAGES] == [24, 7, 7, 4]


@pytest.fixture
def parity(device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs the parity script on two cases; its exit status."""
    if device[0] == "cuda":
        pytest.importorskip("cupy")
    run = load("010_autograd_parity", "run", monkeypatch)
    options = ["--kernels", "bwd_minimal", "bwd_block2d", "--dtypes", "float32", "bfloat16", "--backend"]
    cases = ["--cases", "rows that see no key", "odd head width"]
    return lambda: run.main([*options, device[0], *cases, "--out", str(tmp_path)])


def test_parity(parity, device: Device, tmp_path: Path) -> None:
    """Every kernel within its bound; a row for each, and a picture that can be drawn again."""
    assert parity() == 0
    rows = read(tmp_path)
    assert [row["contender"] for row in rows] == ["autograd", "bwd_minimal", "bwd_block2d"] * 4
    assert all(row["ok"] and 0 < row["dQ"]["error"] <= row["dQ"]["bound"] for row in rows)
    picture = tmp_path / f"worst_{device[0]}.png"
    first = picture.read_bytes()
    picture.unlink()
    assert sys.modules["run"].main(["plot", "--out", str(tmp_path)]) == 0
    assert picture.read_bytes() == first


def nan(dk, dv):
    """dK, every bit of it set, which is NaN in every dtype."""
    bits = dk.view(f"u{dk.itemsize}")
    bits[...] = ~bits.dtype.type(0)
    return dk


@pytest.mark.parametrize("fault", [nan, lambda dk, dv: dv], ids=["NaN", "dV for dK"])
def test_parity_notices(fault, parity, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wrong dK: the status says so, and the row names it."""
    right = sandbox.attention_backward

    def wrong(*arrays, **options):
        dq, dk, dv = right(*arrays, **options)
        return dq, fault(dk, dv), dv

    monkeypatch.setattr(sandbox, "attention_backward", wrong)
    assert parity() == 1
    assert [row["worst"] for row in read(tmp_path) if row["ok"] is False] == ["dK"] * 8


def test_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call compiles, in a process that finds nothing to reuse; the same again does not, but an edited one."""
    first_call = load("014_scores", "first_call", monkeypatch)
    found = first_call.in_fresh_process("a condition", "cpu", 33)
    assert set(found) == {"first", "again", "edited", "backward"}
    assert min(found["first"], found["edited"], found["backward"]) > 2 * found["again"] > 0


@pytest.mark.parametrize("task", ["causal", "packed"])
def test_training(device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, task: str) -> None:
    """Three steps: every attention learns the same."""
    run = load("011_train_gpt", "run", monkeypatch)
    run.main(["--backend", device[0], "--task", task, "--steps", "3", "--starts", "1", "--out", str(tmp_path)])
    errors, *rows, verdict = read(tmp_path)
    assert {"ours", "sdpa-math", "plain"} <= {row["contender"] for row in rows}
    assert errors["ok"], (errors["rms"], errors["bias"])
    assert [call["step"] for call in errors["calls"]] == sorted([0, 2] * run.CONFIGS[device[0]].layers)
    assert all(value < 1e-2 for value in verdict["apart"].values())
    assert all(row["losses"][2] < row["losses"][0] < 5 for row in rows)
    name = f"curves_{device[0]}" + (f"_{task}" if task != "causal" else "")
    assert {path.suffix for path in tmp_path.glob(f"{name}.*")} == {".png", ".svg"}


def test_steps_are_timed(device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In turns: launched, on a GPU queued as well."""
    run = load("011_train_gpt", "run", monkeypatch)
    monkeypatch.setattr(run, "LIMITS", run.Limits(rounds=2, least=2, slow=60, warmup=1))
    monkeypatch.setattr(run.Wall, "STEPS", 1)
    run.main(["time", "--backend", device[0], "--steps", "1", "--length", "32", "--out", str(tmp_path)])
    rows = read(tmp_path)
    expected = {(how, name) for how in ("launched", "queued") for name in ("ours", "sdpa-flash")}
    assert {(row["step"], row["contender"]) for row in rows} & expected == {
        (how, name) for how, name in expected if how == "launched" or device[0] == "cuda"
    }
    assert all(0 < row["ms"]["q1"] <= row["ms"]["median"] <= row["ms"]["q3"] and row["samples"] == 2 for row in rows)
    config = run.CONFIGS[device[0]]
    assert {row["config"]["batch"] for row in rows} == {config.batch * config.length // 32}


def test_documents_of_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each window is cut into documents of its own, none of them empty, and a query sees its own alone."""
    run = load("011_train_gpt", "run", monkeypatch)
    config = run.CONFIGS["cpu"]
    ends = run.documents(config, "cpu")
    assert ends.shape == (config.steps, config.batch * (run.CUTS + 1) + 1)
    assert (ends.diff(dim=1) > 0).all()
    assert (ends[:, :: run.CUTS + 1] == torch.arange(config.batch + 1) * config.length).all()
    q = torch.empty(config.batch, 1, config.length, 8)
    seen = run.seen(q, ends[0])[:, 0]
    first = ends[0, 1 : run.CUTS + 1].tolist()  # of window 0
    assert seen[0, first[0] - 1, : first[0]].all()
    assert not seen[0, first[0], : first[0]].any()
    assert seen.sum() == sum(n * (n + 1) // 2 for n in ends[0].diff().tolist())


def test_curves_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """By how far PyTorch's own are from one another, over all starts: one on which ours is far off is no verdict, but
    ten times as far on all of them, or NaN on one, is."""
    judge = load("011_train_gpt", "curves", monkeypatch).judge
    theirs = {"sdpa-flash": [4.0, 3.0], "sdpa-math": [4.0, 3.01]}
    starts = lambda *ours: [{"ours": [4.0, x], **theirs} for x in ours]  # noqa: E731
    near, far = 3.005, 3.055
    for ours, ok in (([near] * 3, True), ([near, near, far], True), ([far] * 3, False), ([near, float("nan")], False)):
        assert judge(starts(*ours))["ok"] is ok
    verdict = judge(starts(near, far))["standings"]["ours"]
    assert verdict == pytest.approx({"ratio": (0.5 * 5) ** 0.5, "off": 10**0.5, "noise": 0.005})
    compiled = {**theirs, "sdpa-flash, compiled": [4.0, 3.1]}
    found = judge([{"ours": [4.0, 3.1], "ours, compiled": [4.0, 3.1], **compiled}])["standings"]
    assert found["ours"]["ratio"] == pytest.approx(9.5)
    assert found["ours, compiled"]["ratio"] == pytest.approx(0.95, rel=1e-4)
    assert found["sdpa-flash, compiled"] == pytest.approx({"ratio": 9.5, "off": None, "noise": 0.005})


def test_errors_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """By PyTorch's largest: what a kernel that is right does to 16 bits passes; dS cut off instead of rounded, P of 6
    bits, a gradient 1% too small do not, though they leave the curves where they are; nor does NaN."""
    run = load("011_train_gpt", "run", monkeypatch)
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(2, 2, 64, 32, generator=generator).bfloat16()  # noqa: E731
    call = run.errors.Call(0, 0, draw(), draw(), draw(), None, 1e-4 * draw())
    contenders = run.contenders_for("causal", "cpu", False, wrong=True)
    contenders["ours, NaN"] = lambda q, k, v, ends: (q + k + v) * float("nan")
    found = run.errors.errors(contenders, call, run.seen)
    verdicts = {}
    for name in contenders:
        others = {x: f for x, f in found.items() if x == name or not x.startswith("ours")}
        verdicts[name] = run.errors.judge([others])["ok"] if name.startswith("ours") else None
    assert [name for name, ok in verdicts.items() if ok] == ["ours, right"]


def test_models_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """By PyTorch's own errors, tokens and losses; results that are theirs to the last bit are not of our kernels."""
    judged = load("022_models", "run", monkeypatch).judged
    row = lambda name, error, losses, tokens: {"contender": name, "error": error, "losses": losses, "tokens": tokens}  # noqa: E731
    theirs = [row("eager", 0.1, [[4.0, 3.0]] * 2, 60), row("sdpa-flash", 0.09, [[4.0, 3.01]] * 2, 64)]
    right = 0.105, [[4.0, 3.005]] * 2, 61
    assert judged([*theirs, row("slot", *right)])["ok"]
    for place, wrong in ((0, 0.12), (0, float("nan")), (1, [[4.0, 3.05]] * 2), (1, [[4.0, 3.01]] * 2), (2, 59)):
        values = [*right[:place], wrong, *right[place + 1 :]]
        assert not judged([*theirs, row("registered, compiled", *values)])["ok"]


def test_training_while_the_kernel_is_edited(monkeypatch: pytest.MonkeyPatch, project_copy: Path) -> None:
    """A save that does not compile is said and not taken; one that is right is, and the weights stay."""
    pytest.importorskip("watchfiles")
    for name in ("011_train_gpt", "017_edit_while_training"):
        shutil.copytree(ROOT / "experiments" / name, project_copy / "experiments" / name)
    script = project_copy / "experiments" / "017_edit_while_training" / "run.py"
    command = [*INTERRUPTIBLE, sys.executable, script, "--backend", "cpu", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(project_copy), "OMP_NUM_THREADS": "1"}
    threads = torch.get_num_threads()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        events = map(json.loads, process.stdout)
        said = lambda what: next(event for event in events if event["what"] == what)  # noqa: E731
        source = project_copy / "kernels_cu" / "fwd_minimal.cu"
        text, scores = source.read_text(), "head.masked(S_rmem[j]"
        assert scores in text
        said("step")
        source.write_text(text.replace(scores, f"{scores},"))
        broken = said("save")
        assert not broken["ok"]
        assert "fwd_minimal.cu" in broken["message"]
        said("step")
        source.write_text(text.replace(scores, f"{scores} * 1.0001f"))  # within the bound, and other bits
        assert said("save")["ok"]
        first = said("version")["losses"]
        said("step")
        process.send_signal(signal.SIGINT)
        second = said("version")["losses"][:3]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    training = load("017_edit_while_training", "training", monkeypatch)
    torch.set_num_threads(1)  # as there: of two threads' sums some bits differ, and training makes them more
    try:
        alone = training.Training(training.CONFIGS["cpu"], "cpu")
        with sandbox.use_in_torch(**training.KERNELS["cpu"]):
            losses = [alone.step(pytest.fail)[0] for _ in (*first, *second)]
    finally:
        torch.set_num_threads(threads)
    assert first == losses[: len(first)]
    assert second == pytest.approx(losses[len(first) :], abs=0.1)
    assert second != losses[len(first) :]
    assert second[0] < first[0] - 0.5


def test_training_waits_where_a_kernel_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved between its trial and its reload, say: the step is repeated, from the same weights."""
    training = load("017_edit_while_training", "training", monkeypatch)
    alone, raised = training.Training(training.CONFIGS["cpu"], "cpu"), []
    right, sdpa = alone.step(pytest.fail), training.F.scaled_dot_product_attention
    before = [p.detach().clone() for p in alone.model.parameters()]

    def broken(*arrays, **options):
        monkeypatch.setattr(training.F, "scaled_dot_product_attention", sdpa)
        raise sandbox.UnsupportedProblem("not built")

    monkeypatch.setattr(training.F, "scaled_dot_product_attention", broken)

    def again(error: Exception) -> None:
        raised.append(str(error))
        assert all(torch.equal(a, b) for a, b in zip(before, alone.model.parameters(), strict=True))

    assert alone.step(again)[0] < right[0]
    assert raised == ["not built"]


def test_generating(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A step with the cache, in a row and in pages, gives the logits of the whole text at once; one key less, not."""
    run = load("021_generate", "run", monkeypatch)
    assert run.main(["--backend", "cpu", "--out", str(tmp_path)]) == 0
    assert [row["contender"] for row in read(tmp_path)] == ["fwd_decode", "pages of 16", "sdpa"]
    model, prompt = sys.modules["model"].Generator(run.TINY, 2, "cpu"), torch.randint(50, (2, 9))
    shorter = lambda q, k, v, lengths: run.ours(q, k, v, lengths - 1)  # noqa: E731
    assert run.error_of_a_step(model, prompt, shorter) > 4 * max(row["error"] for row in read(tmp_path))


OTHER_RANK = """
import os, sys
import run
options = ["--backend", "cpu", "--rows", "32", "--out", sys.argv[1]]
assert run.main(options) == 0
os.environ["MASTER_PORT"] = sys.argv[2]
run.main(["victim", *options])
"""


def test_context_parallel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PyTorch's ring of two processes, one of them this, ends in the operators that the slot makes ours, forward and
    backward, with the balance of causal and without; and when the other process is gone, this one gets an error."""
    run = load("019_context_parallel", "run", monkeypatch)
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(str(free.getsockname()[1]))
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ports[0], "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "0")
    path = os.pathsep.join(map(str, (ROOT / "experiments" / "019_context_parallel", ROOT)))
    own = {**os.environ, "RANK": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    other = subprocess.Popen([sys.executable, "-c", OTHER_RANK, str(tmp_path), ports[1]], env=own)
    try:
        options = ["--backend", "cpu", "--rows", "32", "--out", str(tmp_path)]
        assert run.main(options) == 0
        monkeypatch.setenv("MASTER_PORT", ports[1])
        with pytest.raises(RuntimeError, match=r"(?i)connection|peer"):
            run.main(["victim", *options])
        assert other.wait(timeout=60) == -signal.SIGKILL
    finally:
        other.kill()
        other.wait()
        if torch.distributed.is_initialized():
            leave_process_group()
    rows = read(tmp_path)
    turns = ["one GPU", "alltoall", "allgather"]
    assert [(row["causal"], row["rotate"]) for row in rows] == [(causal, t) for causal in (True, False) for t in turns]
    assert all(0 < row["excess"] <= 1 for row in rows if row["rotate"] != "one GPU")
    assert all(row["gpus"] == 2 and min(row["forward_ms"], row["both_ms"]) > 0 for row in rows)


def test_what_the_ring_is_held_against(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit too much is seen, and the model of many GPUs says what one GPU and earlier measurements say."""
    excess = load("019_context_parallel", "ring", monkeypatch).excess
    x = torch.tensor([1.0, -3.0], dtype=torch.bfloat16)
    unit = 2.0**-6  # of bfloat16 between 2 and 4
    assert excess(x + torch.tensor([4 * unit, 0]), x, 2) == 1.0
    assert excess(x + torch.tensor([0, 5 * unit]), x, 2) == 1.25
    assert not excess(x * torch.nan, x, 2) <= 1
    model = load("019_context_parallel", "model", monkeypatch)
    alone = [model.tflops(method, 8 << 20, 1)[0] * 1e12 for method in model.METHODS]
    assert alone == pytest.approx([model.Machine().forward] * 3, rel=1e-3)
    for (gpus, S), (measured, _) in model.MEASURED.items():
        assert model.tflops("ring", S, gpus, True, model.EARLIER) == pytest.approx(measured, rel=0.06)


def test_the_pairs_of_sparse_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a time is divided by: as many pairs as the condition itself leaves."""
    walk = load("014_scores", "walk", monkeypatch)
    for what, _, S, options in walk.cases(torch, "cpu", 2048, 512):
        i, j, score = np.arange(S)[:, None], np.arange(S)[None], options.get("score")
        seen = score.evaluate(np.zeros((S, S)), 0, 0, i, j, S, S)[2] if score else np.ones((S, S), bool)
        seen = seen & (i >= j) if options.get("causal") else seen
        assert walk.pairs(torch, score, S, bool(options.get("causal"))) == seen.sum(), what
