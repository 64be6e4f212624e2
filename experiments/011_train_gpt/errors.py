"""O, dQ, dK and dV of a model's own attention calls, beside float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gpt import Attend
from torch import Tensor

NAMES = ("O", "dQ", "dK", "dV")
WITHIN = 1.1  # limit of the RMS error, relative to the largest of PyTorch's implementations
BIASED = 0.3  # limit of the part of the error that is proportional to the value


@dataclass
class Call:
    """One attention call of a layer in a training step: (B, H, S, D) each."""

    step: int
    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    ends: Tensor | None
    dO: Tensor | None = None  # set by the backward


def recorded(attend: Attend, layers: int, steps: Iterable[int]) -> tuple[Attend, list[Call]]:
    """`attend`, and a list that receives its calls in these steps."""
    calls, count, wanted = [], 0, set(steps)

    def recording(q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None) -> Tensor:
        nonlocal count
        (step, layer), count = divmod(count, layers), count + 1
        out = attend(q, k, v, ends)
        if step in wanted:
            call = Call(step, layer, q.detach(), k.detach(), v.detach(), ends)
            out.register_hook(lambda dO: setattr(call, "dO", dO.detach()))
            calls.append(call)
        return out

    return recording, calls


def reference(call: Call, visible: Tensor) -> list[Tensor]:
    """O, dQ, dK, dV in float64."""
    q, k, v, dO = (x.double() for x in (call.q, call.k, call.v, call.dO))
    unit = q.shape[3] ** -0.5
    P = (q @ k.mT * unit).masked_fill(~visible, float("-inf")).softmax(dim=-1)
    O = P @ v
    dS = P * (dO @ v.mT - (dO * O).sum(-1, keepdim=True))
    return [O, dS @ k * unit, dS.mT @ q * unit, P.mT @ dO]


def errors(contenders: Mapping[str, Attend], call: Call, visible: Callable[..., Tensor]) -> dict[str, dict[str, Any]]:
    """For each contender that supports the call and each of NAMES: the RMS error relative to the RMS value, and the
    bias, the signed part of the error along the value: -0.003 for values that are 0.3% too small everywhere."""
    expected, found = reference(call, visible(call.q, call.ends)), {}
    for name, attend in contenders.items():
        q, k, v = (x.clone().requires_grad_() for x in (call.q, call.k, call.v))
        try:
            O = attend(q, k, v, call.ends)
        except RuntimeError:
            continue  # reported when it trains
        values = (O.detach(), *torch.autograd.grad(O, (q, k, v), call.dO))
        off = [x.double() - y for x, y in zip(values, expected, strict=True)]
        found[name] = {
            "rms": {n: float(e.norm() / y.norm()) for n, e, y in zip(NAMES, off, expected, strict=True)},
            "bias": {n: float((e * y).sum() / y.square().sum()) for n, e, y in zip(NAMES, off, expected, strict=True)},
        }
    return found


def compare(calls: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """The largest RMS error of ours over all calls and tensors, relative to PyTorch's largest, and the largest share of
    bias in an error. `ok`: no error exceeds WITHIN or BIASED."""
    mine = [name for name in calls[0] if name.startswith("ours")]
    worst: dict[str, Any] = {"rms": {}, "bias": {}}
    for name in mine:
        rms, bias = [], []
        for call in calls:
            for n in NAMES:
                most = max(found["rms"][n] for other, found in call.items() if other not in mine)
                rms.append(call[name]["rms"][n] / most)
                bias.append(abs(call[name]["bias"][n]) / call[name]["rms"][n])
        worst["rms"][name] = float(torch.tensor(rms).max())  # NaN if one is
        worst["bias"][name] = float(torch.tensor(bias).max())
    kept = ((worst["rms"], WITHIN), (worst["bias"], BIASED))
    return {**worst, "ok": all(x <= limit for values, limit in kept for x in values.values())}
