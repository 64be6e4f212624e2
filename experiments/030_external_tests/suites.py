"""The two suites: which tests there are, in which order, and how one is run."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import itertools
import logging
import os
import random
import re
import sys
import traceback
import unittest
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
CHUNK = 6  # tests that need the same compiled kernels
Test = dict[str, Any]
Answer = tuple[str, str, dict[str, Any]]  # outcome, text, more columns


def _imported(path: str, source: str | None = None) -> ModuleType:
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[module.__name__] = module
    if source is None:
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    else:
        exec(compile(source, path, "exec"), module.__dict__)
    return module


def _short(error: BaseException) -> str:
    """The exception and the ends of its traceback."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "\n".join(lines[-18:])[-2000:]


def _after_test(device: str) -> None:
    """Other workers need the GPU memory that PyTorch keeps."""
    import torch

    if device == "cuda" and torch.cuda.memory_reserved() > 2 << 30:
        gc.collect()
        torch.cuda.empty_cache()


def _broken(device: str) -> bool:
    """Whether an error of CUDA has ended the use of the GPU in this process."""
    import torch

    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
    return False


class Flash:
    """FlashAttention's tests/test_flash_attn.py, with `flash_attn_shim` as flash_attn. The functions are called without
    pytest, which would take minutes to collect 250,000 parametrisations."""

    # Parameters that do not select other compiled kernels.
    SAME = frozenset((
        "seqlen", "seqlen_q", "seqlen_k", "seqlen_q,seqlen_k", "swap_sq_sk", "num_splits", "rotary_fraction",
        "rotary_interleaved", "seqlen_new_eq_seqlen_q", "mha_type", "kvpacked", "append_knew",
    ))  # fmt: skip
    CHECKED = "test_flash_attn_kvcache_paged_block_table_bounds"  # expects an error that needs SANDBOX_CHECKED=1
    NOT_OURS = frozenset(("test_flash_attn_generator_arg_must_be_none",))  # arguments of FlashAttention's C++ functions

    def __init__(self, path: str, device: str):
        import torch

        sys.path.insert(0, str(HERE / "flash_attn_shim"))
        source, self.device = Path(path).read_text(), device
        torch.use_deterministic_algorithms(False)  # imports much when it is first called
        if device == "cpu":
            source = source.replace('"cuda"', '"cpu"')
            torch.cuda.get_device_capability = lambda *_: (9, 0)
            torch.cuda.get_device_properties = lambda *_: SimpleNamespace(total_memory=1 << 40)
        self.module = _imported(path, source)

    def chunks(self, sample: int | None, seed: int) -> list[list[Test]]:
        """Chunks of up to `CHUNK` tests that need the same kernels, in random order. `sample`: about so many tests, of
        each function in proportion to the number of its parametrisations to the power of 0.3, at most all of them."""
        names = [name for name in vars(self.module) if name.startswith("test_") and name not in self.NOT_OURS]
        every = {name: [*self._parametrisations(name)] for name in names}
        generator = random.Random(seed)
        shares = _shares({name: len(found) for name, found in every.items()}, sample)
        chunks = []
        for name, found in every.items():
            groups = defaultdict(list)
            for parameters in found:
                groups[tuple((k, v) for k, v in parameters.items() if k not in self.SAME)].append(parameters)
            chunks += [
                [self._test(name, parameters) for parameters in chunk]
                for chunk in _drawn([*groups.values()], shares[name], generator)
            ]
        generator.shuffle(chunks)
        return chunks

    def _test(self, name: str, parameters: dict[str, Any]) -> Test:
        test = {"test": name, "parameters": parameters}
        return test | ({"environment": {"SANDBOX_CHECKED": "1"}} if name == self.CHECKED else {})

    def _parametrisations(self, name: str) -> Iterator[dict[str, Any]]:
        marks = [mark for mark in getattr(getattr(self.module, name), "pytestmark", ()) if mark.name == "parametrize"]
        axes = [[self._values(mark.args[0], value) for value in mark.args[1]] for mark in marks]
        for values in itertools.product(*axes):
            yield {key: value for each in values for key, value in each.items()}

    @staticmethod
    def _values(names: str, value: Any) -> dict[str, Any]:
        keys = [key.strip() for key in names.split(",")]
        values = value if len(keys) > 1 else (value,)
        return {k: v if isinstance(v, str | int | float | None) else str(v) for k, v in zip(keys, values, strict=True)}

    def run(self, test: str, parameters: dict[str, Any]) -> Answer:
        import pytest
        import torch

        given = {k: getattr(torch, v[6:]) if str(v).startswith("torch.") else v for k, v in parameters.items()}
        torch.use_deterministic_algorithms(False)
        try:
            getattr(self.module, test)(**given)
        except pytest.skip.Exception as skipped:
            return "skipped", str(skipped.msg or ""), {}
        except torch.OutOfMemoryError as error:
            text = _short(error)
            del error
            gc.collect()
            torch.cuda.empty_cache()
            return "out of memory", text, {}
        except (Exception, pytest.fail.Exception) as error:
            return "failed", _short(error), {}
        _after_test(self.device)
        return "passed", "", {}

    def broken(self) -> bool:
        return _broken(self.device)


class Torch:
    """PyTorch's test/test_transformers.py, each test without and with `sandbox.use_in_torch()`."""

    NAMES = re.compile("flash|fused|sdpa|scaled_dot_product|nested|attention|attn", re.IGNORECASE)
    OURS = re.compile(r"^sandbox\.[\w.]+: ", re.MULTILINE)

    def __init__(self, path: str, device: str):
        os.environ["PYTORCH_TESTING_DEVICE_ONLY_FOR"] = device
        import torch

        from sandbox.api import torch_slot

        self.device, self.torch, self.calls = device, torch, 0
        self.refusals: list[str] = []
        torch.use_deterministic_algorithms(False)  # imports much when it is first called
        torch.set_warn_always(True)  # a test runs twice in a process, and may expect a warning both times
        attend = torch_slot.Slot.attend

        def counted(slot: Any, *args: Any) -> Any:
            found = attend(slot, *args)
            self.calls += 1
            return found

        torch_slot.Slot.attend = counted  # type: ignore[method-assign]
        handler = logging.Handler()
        handler.emit = lambda record: self.refusals.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("sandbox")
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        self.module = _imported(path)

    def chunks(self, sample: int | None, seed: int) -> list[list[Test]]:
        """Chunks of tests whose names are neighbours, in random order. `sample`: as for FlashAttention."""
        functions = defaultdict(list)
        for name, value in vars(self.module).items():
            if inspect.isclass(value) and issubclass(value, unittest.TestCase):
                for method in unittest.TestLoader().getTestCaseNames(value):
                    if self.NAMES.search(f"{name}.{method}"):
                        functions[name, self._function(value, method)].append(f"{name}.{method}")
        shares = _shares({key: len(found) for key, found in functions.items()}, sample)
        generator = random.Random(seed)
        chunks = []
        for (name, function), found in functions.items():
            groups = [found[at : at + CHUNK] for at in range(0, len(found), CHUNK)]
            for chunk in _drawn(groups, shares[name, function], generator):
                short = {"function": f"{name}.{function}"}
                chunks.append([{"test": test, "parameters": short} for test in chunk])
        generator.shuffle(chunks)
        return chunks

    @staticmethod
    def _function(case: type, method: str) -> str:
        """The name of the test without its parameters."""
        function = inspect.unwrap(getattr(case, method))
        return function.__name__ if method.startswith(function.__name__) else method.partition("_cuda")[0]

    def run(self, test: str, parameters: dict[str, Any]) -> Answer:
        import sandbox

        without, before, memory = self._one(test)
        self.calls, self.refusals = 0, []
        with sandbox.use_in_torch():
            outcome, text, more_memory = self._one(test)
        _after_test(self.device)
        refusal = next((line for line in self.refusals if "own kernel" in line), "")
        more = {"without": without, "calls": self.calls} | ({"refused": refusal[:200]} if refusal else {})
        if memory or more_memory:
            return "out of memory", before or text, more
        if without in ("failed", "skipped"):
            return f"{without} without, {outcome} with", before if without == "failed" else "", more
        if outcome == "failed" and self.OURS.search(text):
            return "explained", text, more
        return outcome, text, more

    def _one(self, test: str) -> tuple[str, str, bool]:
        """(outcome, text, whether GPU memory was exhausted)."""
        name, method = test.split(".")
        self.torch.use_deterministic_algorithms(False)
        result = unittest.TestResult()
        getattr(self.module, name)(method).run(result)
        for _, reason in result.skipped:
            return "skipped", reason, False
        for _, text in (*result.errors, *result.failures):
            return "failed", "\n".join(text.splitlines()[-18:])[-2000:], "OutOfMemoryError" in text
        return "failed" if result.unexpectedSuccesses else "passed", "", False

    def broken(self) -> bool:
        with contextlib.suppress(Exception):
            self.torch._dynamo.reset()
        return _broken(self.device)


def _shares(counts: dict[Any, int], sample: int | None) -> dict[Any, int]:
    """How many of `sample` tests each function has: in proportion to count^0.3, at most all."""
    if sample is None or sample >= sum(counts.values()):
        return counts
    shares: dict[Any, int] = {}
    left, weight = sample, sum(count**0.3 for count in counts.values())
    for key, count in sorted(counts.items(), key=lambda item: item[1]):
        shares[key] = min(count, max(1, round(left * count**0.3 / weight)))
        left, weight = left - shares[key], weight - count**0.3
    return shares


def _drawn(groups: list[list[Any]], count: int, generator: random.Random) -> list[list[Any]]:
    """`count` elements in chunks of at most `CHUNK`, each of one group; no group twice before all were drawn once."""
    for group in groups:
        generator.shuffle(group)
    chunks: list[list[Any]] = []
    at = 0
    while count > 0 and any(len(group) > at for group in groups):
        generator.shuffle(groups)
        for group in groups:
            if (chunk := group[at : at + min(CHUNK, count)]) and count > 0:
                chunks.append(chunk)
                count -= len(chunk)
        at += CHUNK
    return chunks


SUITES: dict[str, Any] = {"flash": Flash, "torch": Torch}
