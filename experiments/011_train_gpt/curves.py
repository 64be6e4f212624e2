"""Curves of losses: the distance between them, and their figure."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from sandbox.core import picture

FACTOR = 2  # limit of `standing` for our curves
COLOURS = {
    "ours": "#d62728", "sdpa-flash": "#4d4d4d", "sdpa-math": "#c49c3f", "sdpa-efficient": "#7b8fb2",
    "sdpa-cudnn": "#a06aa0",
    "plain": "#8fae8b", "varlen": "#4d4d4d",
}  # fmt: skip


def distance(a: list[float], b: list[float]) -> float:
    """The mean over all steps of |difference of losses|, at least one unit in the last place of a float32 loss."""
    return float(np.maximum(np.abs(np.subtract(a, b)).mean(), np.spacing(np.float32(np.max(a)))))


def standing(starts: list[dict[str, list[float]]], name: str, theirs: list[str]) -> dict[str, float | None]:
    """The distance of the curves of `name` from those of `theirs`, in units of the distances among `theirs`.

    For each start: the mean distance to them over the mean of their own. `ratio` is the geometric mean over the starts,
    `off` its standard error as a factor (None for one start), `noise` the mean of their own distances.
    """
    pairs = list(itertools.combinations(theirs, 2))
    own = np.array([np.mean([distance(curves[a], curves[b]) for a, b in pairs]) for curves in starts])
    far = np.array([np.mean([distance(curves[name], curves[x]) for x in theirs]) for curves in starts])
    logs = np.log(far / own)
    off = float(np.exp(logs.std(ddof=1) / len(logs) ** 0.5)) if len(logs) > 1 else None
    return {"ratio": float(np.exp(logs.mean())), "off": off, "noise": float(own.mean())}


def compare(starts: list[dict[str, list[float]]]) -> dict[str, Any]:
    """The standing of each of our curves among PyTorch's, and of each of PyTorch's among the others if there are two.
    PyTorch's compiled curve is compared with our compiled one only. `ok`: none of ours exceeds FACTOR."""
    names = list(starts[0])
    found = {}
    for name in names:
        theirs = [
            x for x in names if x != name and not x.startswith("ours") and ("compiled" in name or "compiled" not in x)
        ]
        if len(theirs) > 1:
            found[name] = standing(starts, name, theirs)
    apart = {
        f"{a} | {b}": float(np.mean([distance(curves[a], curves[b]) for curves in starts]))
        for a, b in itertools.combinations(names, 2)
        if not b.startswith("ours")  # which come first
    }
    ok = all(found[name]["ratio"] <= FACTOR for name in names if name.startswith("ours"))
    return {"apart": apart, "standings": found, "ok": ok}


def draw(rows: list[dict[str, Any]], prefix: Path) -> None:
    """The rows of one start -> PREFIX.png: losses above, differences to the first of PyTorch's below, in the same
    colours."""
    curves = {row["contender"]: np.array(row["losses"]) for row in rows}
    first = next(name for name in curves if not name.startswith("ours"))
    config, steps = rows[0]["config"], np.arange(rows[0]["config"]["steps"])
    window = max(1, len(steps) // 25)
    style = {"axes.spines.top": False, "axes.spines.right": False}
    with picture.figure(10, 6, style=style) as figure:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for name, losses in curves.items():
            look = {"color": COLOURS[name.partition(",")[0]], "linestyle": ":" if "," in name else "-"}
            look |= {"linewidth": 1.2, "zorder": 3} if name.startswith("ours") else {"linewidth": 3, "alpha": 0.6}
            top.plot(steps, losses, label=name, **look)
            apart = np.convolve(abs(losses - curves[first]), np.ones(window) / window, mode="valid")
            if apart.any():
                bottom.plot(steps[window - 1 :], apart, **look)
        top.set(ylabel="loss of the step, nats per character")
        top.legend(frameon=False)
        smooth = f"\nmean of {window} steps" if window > 1 else ""
        bottom.set(yscale="log", xlabel="step", ylabel=f"|difference from {first}|{smooth}")
        for axis in (top, bottom):
            axis.grid(color="#e4e4e4", linewidth=0.8)
        task = {"dropout": "dropout, ", "packed": "packed documents, "}.get(rows[0].get("task", ""), "")
        shape = "{layers} layers, width {width}, {heads} heads, S {length}, batch {batch}, {dtype}".format(**config)
        figure.suptitle(f"{task}{shape}  ·  {rows[0]['device'] or 'CPU backend'}", fontsize=10)
        picture.compact(picture.save(figure, prefix))
