"""What tests of the interface share."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """No test meets what another compiled: PyTorch compiles a function eight times at most, then gives up on it."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
