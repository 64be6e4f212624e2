"""Curves of losses: do they coincide, and how do they look?"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

FACTOR = 2  # curves coincide when they differ by at most so many times what PyTorch's own differ by
COLOURS = {
    "ours": "#d62728", "sdpa-flash": "#4d4d4d", "sdpa-math": "#c49c3f", "sdpa-efficient": "#7b8fb2",
    "sdpa-cudnn": "#a06aa0",
    "plain": "#8fae8b", "varlen": "#4d4d4d",
}  # fmt: skip


def judge(curves: dict[str, list[float]]) -> dict[str, Any]:
    """How far two curves are apart: the mean over all steps of |difference of losses|.

    The two of PyTorch's own that are farthest apart are the noise (the compiled one is noise to our compiled one only);
    `ratios` has the PyTorch curve that ours is farthest from, in units of it; `ok` says that none is over FACTOR.
    """
    losses = {name: np.array(curve) for name, curve in curves.items()}
    apart = {(a, b): float(abs(losses[a] - losses[b]).mean()) for a, b in itertools.combinations(losses, 2)}
    finest = float(np.spacing(np.float32(losses["sdpa-math"].max())))  # a float32 loss resolves no less
    noises, ratios = {}, {}
    for mine in (name for name in losses if name.startswith("ours")):
        theirs = [
            name for name in losses if not name.startswith("ours") and ("compiled" in mine or "compiled" not in name)
        ]
        noises[mine] = max(finest, *(apart[pair] for pair in itertools.combinations(theirs, 2)))
        ratios[mine] = float(np.max([apart[mine, name] for name in theirs])) / noises[mine]  # NaN if one is
    ok = all(ratio <= FACTOR for ratio in ratios.values())
    return {"apart": {" | ".join(pair): x for pair, x in apart.items()}, "noise": noises, "ratios": ratios, "ok": ok}


def draw(rows: list[dict[str, Any]], prefix: Path) -> None:
    """The rows of one run -> PREFIX.png and .svg: losses above, differences to the first of PyTorch's below."""
    import matplotlib
    from matplotlib.figure import Figure

    curves = {row["contender"]: np.array(row["losses"]) for row in rows}
    first = next(name for name in curves if not name.startswith("ours"))
    config, steps = rows[0]["config"], np.arange(rows[0]["config"]["steps"])
    window = max(1, len(steps) // 25)
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "sandbox"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10, 6), dpi=100, layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for name, losses in curves.items():
            look = {"color": COLOURS[name.partition(",")[0]], "linestyle": ":" if "," in name else "-"}
            look |= {"linewidth": 1.2, "zorder": 3} if name.startswith("ours") else {"linewidth": 3, "alpha": 0.6}
            top.plot(steps, losses, label=name, **look)
            apart = np.convolve(abs(losses - curves[first]), np.ones(window) / window, mode="valid")
            if apart.any():
                bottom.plot(steps[window - 1 :], apart, label=f"{name} − {first}", **look)
        top.set(ylabel="loss of the step, nats a character")
        bottom.set(yscale="log", xlabel="step", ylabel=f"|difference|, mean of {window} steps")
        for axis in (top, bottom):
            axis.legend(frameon=False)
            axis.grid(color="#e4e4e4", linewidth=0.8)
        task = {"dropout": "dropout, ", "packed": "packed documents, "}.get(rows[0].get("task", ""), "")
        shape = "{layers} layers, width {width}, {heads} heads, S {length}, batch {batch}, {dtype}".format(**config)
        figure.suptitle(f"{task}{shape}  ·  {rows[0]['device'] or 'CPU backend'}", fontsize=10)
        figure.savefig(f"{prefix}.png", metadata={"Software": None})
        figure.savefig(f"{prefix}.svg", metadata={"Date": None})
