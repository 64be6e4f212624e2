"""Tuning on a Dask cluster: here with two workers on this machine, and the CPU backend in place of GPUs."""

from __future__ import annotations

import importlib.util
import json
import operator
import os
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sandbox.cli import cli
from sandbox.core import jsonl, registry
from sandbox.core.errors import ToolchainMissing, UnsupportedProblem
from sandbox.engine import tuned
from sandbox.jobs.distributed import DistributedPool, DistributedUnavailable
from sandbox.jobs.worker import WorkerDied
from sandbox.tune import executors

distributed = pytest.importorskip("distributed")
KERNEL = registry.get("fwd_minimal")
WORKER = executors.WorkerInfo("a", "0", "a GPU", "sm_90a", tuned.digest(KERNEL), {"device": "a GPU"})


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a scheduler with two workers, processes like those of `dask worker`."""
    # Port 0 is any free port. With None the scheduler listens on 8787, and warns if another test has it.
    options = {"n_workers": 2, "threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    with distributed.LocalCluster(**options) as local:
        yield local.scheduler_address


def test_a_crash_costs_its_job_alone(address: str) -> None:
    """The Dask worker survives and starts a new process for the next job; all processes end with the pool."""
    with DistributedPool(address, 60) as cluster:
        before = set(cluster.everywhere(os.getpid).values())
        assert dict(cluster.map(operator.mul, [(n, 2) for n in range(8)])) == {(n, 2): 2 * n for n in range(8)}
        lost = [result for call in (os.abort, os.getpgid) for _, result in cluster.map(call, [()])]
        assert all(isinstance(result, WorkerDied) for result in lost)
        assert str(lost[0]) == "it was aborted (SIGABRT)"
        assert str(lost[1]).startswith("TypeError: ")
        after = set(cluster.everywhere(os.getpid).values())
    assert len(before) == len(after) == 2
    assert before != after
    assert not any(Path(f"/proc/{pid}").exists() for pid in before | after)


def tune(*options: str) -> Result:
    return CliRunner().invoke(
        cli, ["tune", "fwd_minimal", "--shape", "1,1,40,16", "--fix", "BLOCK_M=32,BLOCK_N=8", *options]
    )


def test_tune_on_a_cluster(address: str, own_cache: Path) -> None:
    """Results are stored on this machine, and a finished search measures nothing again."""
    result = tune("--backend", "cpu", "--dask", address, "--json")
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    assert found["gpu"] == executors.EMULATION
    assert {c["state"] for c in found["candidates"]} == {"timed"}
    rows = jsonl.read(tuned.path(KERNEL, "measurements"))
    assert [row["ok"] for row in rows] == [True] * len(found["candidates"])
    assert all(row["commit"] for row in rows)
    assert tune("--backend", "cpu", "--dask", address).exit_code == 0
    assert jsonl.read(tuned.path(KERNEL, "measurements")) == rows


@pytest.mark.parametrize(
    ("others", "error", "message"),
    [
        ([{"gpu": "another GPU", "handle": "1"}], UnsupportedProblem, "tuning on a GPU, another GPU is not supported"),
        ([{}], DistributedUnavailable, "2 workers on a share GPU 0: start `dask cuda worker`"),
        ([{"digest": "another"}], DistributedUnavailable, "the worker tcp://1 on a has another source of fwd_minimal"),
    ],
)
def test_workers_that_do_not_fit(others: list[dict[str, Any]], error: type[Exception], message: str) -> None:
    executor = executors.DistributedExecutor(KERNEL, "tcp://127.0.0.1:8786", None)
    infos = [WORKER, *(executors.WorkerInfo(**{**vars(WORKER), **other}) for other in others)]
    with pytest.raises(error, match=message):
        executor._validated({f"tcp://{n}": worker_info for n, worker_info in enumerate(infos)})
    lost = {"tcp://0": WorkerDied("GpuUnavailable: no driver")}
    with pytest.raises(
        DistributedUnavailable, match="the worker tcp://0 cannot tune fwd_minimal: GpuUnavailable: no dri"
    ):
        executor._validated(lost)
    assert executor._validated({"tcp://0": WORKER}) == {"device": "a GPU"}
    assert (executor.gpu, executor.arch) == ("a GPU", "sm_90a")


def test_a_scheduler_that_stops(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*args: Any, **options: Any) -> None:
        raise CancelledError

    with DistributedPool(address, 60) as cluster:
        monkeypatch.setattr(distributed, "wait", wait)
        with pytest.raises(DistributedUnavailable, match="has stopped: start it again"):
            list(cluster.map(operator.mul, [(1, 2)]))


@pytest.mark.parametrize("address", ["nonsense", "what://127.0.0.1:1", "tcp://no-such-host.invalid:8786"])
def test_an_address_without_a_scheduler(address: str) -> None:
    result = tune("--backend", "cpu", "--dask", address)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"sandbox: no Dask scheduler answers at {address!r} (")
    assert "start one with `dask scheduler`" in result.stderr


def test_without_dask_or_with_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    result = tune("--dask", "tcp://127.0.0.1:8786", "--gpus", "0")
    assert result.exit_code == 2
    assert "cannot be combined" in result.stderr
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolchainMissing, match=r"attention-sandbox\[cluster\]"):
        DistributedPool("tcp://127.0.0.1:8786", 1)
