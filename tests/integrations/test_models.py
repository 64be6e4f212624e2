"""Models of transformers and timm in the slot and registered, on a GPU: as right as on PyTorch's own attention."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "022_models"
NAMES = ("GPT-2", "Llama", "ViT", "ViT, timm")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # of libraries that are not ours
]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """The experiment's modules, by name."""
    monkeypatch.syspath_prepend(FOLDER)
    for name in ("models", "run"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in ("models", "run"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", NAMES)
def test_logits_tokens_and_losses(name: str, load, tmp_path: Path, capsys) -> None:
    """What experiment 022 says of 50 steps, from half of its starts."""
    if "timm" in name:
        pytest.importorskip("timm")
    run = load("run")
    ok = run.main(["--backend", "cuda", "--models", name, "--starts", "4", "--out", str(tmp_path)]) == 0
    assert ok, capsys.readouterr().out


def gradients(models, run, module) -> list[torch.Tensor]:
    """The loss, and each weight's gradient, of the layers in bfloat16 by autocast."""
    module.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = models.loss_of(run, *models.batch("Llama", SMALL(models), "cuda", 0))
    loss.backward()
    grads = [p.grad for p in module.parameters()]
    return [loss.detach(), *(g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in grads)]


def SMALL(models):
    return models.Size(layers=2, heads=4, width=256, length=130, batch=2, image=64)


def apart(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((x - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("how", ["slot", "registered"])
def test_compiled_checkpointed_and_distributed(how: str, load, tmp_path: Path) -> None:
    """The gradients of the plain model, whatever is put around it; and those that PyTorch's kernels give."""
    models = load("models")
    make = lambda: models.made("Llama", how, SMALL(models), "cuda").train()  # noqa: E731
    with models.attention_of("sdpa-flash", "cuda"):
        plain = models.made("Llama", "sdpa-flash", SMALL(models), "cuda").train()
        theirs = gradients(models, plain, plain)
    with models.attention_of(how, "cuda"):
        module = make()
        ours = gradients(models, module, module)
        assert 0 < apart(ours, theirs) < 3e-2
        close = lambda found: apart(found, ours) < 2e-2  # noqa: E731  # dQ is summed in any order
        if how == "registered":  # see `compiled_of`
            assert close(gradients(models, torch.compile(module, backend="aot_eager"), module))
        module.gradient_checkpointing_enable()
        assert close(gradients(models, module, module))
        module.gradient_checkpointing_disable()
        store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
        try:
            parallel = torch.nn.parallel.DistributedDataParallel(module)
            assert close(gradients(models, parallel, module))
            sharded = torch.distributed.fsdp.fully_shard(make())
            assert close(gradients(models, sharded, sharded))
        finally:
            torch.distributed.destroy_process_group()
