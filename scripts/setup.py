"""Make .venv with the wheels that suit this machine. `make` runs this; nothing but the standard library is needed.

SANDBOX_CUDA=12, 13 or none overrules what is found.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
READY = VENV / "ready"  # says what the environment was made for; written last, so that it vouches for the rest

# CUDA major -> extra, and the torch that fits beside it.
WHEELS = {"13": ("cuda13", "torch>=2.11"), "12": ("cuda12", "torch==2.10.*"), "none": ("nvrtc13", None)}

# Exact, because only `==…+cpu` names a CPU build: a range takes the newest release and gigabytes of CUDA with it.
TORCH_CPU = "torch==2.13.0"

# In a process of its own: a broken driver may hang or crash.
PROBE = """
import ctypes
cuda, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
print(cuda.cuInit(0), cuda.cuDriverGetVersion(ctypes.byref(version)) or version.value)
"""


def say(message: str) -> None:
    print(f"setup: {message}", flush=True)


def fail(message: str) -> None:
    sys.exit(f"setup: failed: {message}")


def done(*command: str | Path, quiet: bool = False, timeout: float | None = None) -> bool:
    """Whether the command succeeded. Without input, so that nothing can stop to ask."""
    sink = subprocess.DEVNULL if quiet else None
    try:
        result = subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return result.returncode == 0


def install(*requirements: str, quiet: bool = False) -> bool:
    return done(
        PYTHON, "-m", "pip", "install", "-qq", "--no-input", "--disable-pip-version-check", *requirements, quiet=quiet
    )


def choose_cuda() -> tuple[str, str]:
    """The key into WHEELS, and why."""
    asked = os.environ.get("SANDBOX_CUDA")
    if asked:
        if asked not in WHEELS:
            fail(f"SANDBOX_CUDA={asked}: it must be 12, 13 or none")
        return asked, "SANDBOX_CUDA says so"
    try:
        probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return "none", "the NVIDIA driver does not answer"
    if probe.returncode:
        return "none", "no NVIDIA driver found"
    error, version = map(int, probe.stdout.split())
    if error:
        return "none", f"the NVIDIA driver offers no GPU (cuInit: error {error})"
    why = f"the driver supports CUDA {version // 1000}.{version % 1000 // 10}"
    if version < 12000:
        return "none", f"{why}, which is too old: update it to 525 or newer, then `make setup`"
    return ("13" if version >= 13000 else "12"), why


def install_torch_cpu() -> bool:
    # macOS has CPU builds only, under the plain version.
    if install(TORCH_CPU + ("" if sys.platform == "darwin" else "+cpu"), quiet=True):
        return True
    # The configured indexes have none, and uv knows where PyTorch keeps its own.
    uv = (PYTHON, "-m", "uv", "pip", "install", "--python", PYTHON, "--torch-backend=cpu", TORCH_CPU)
    return install("uv", quiet=True) and done(*uv, quiet=True, timeout=1800)


def main() -> None:
    started = time.monotonic()
    version = sys.version.split()[0]
    if sys.version_info < (3, 11):  # noqa: UP036  (an older Python gets this far, to be told)
        fail(f"Python 3.11 or newer is needed, this is {version}; try PYTHON=python3.12 make setup")
    if importlib.util.find_spec("ensurepip") is None:
        fail("this Python makes no virtual environments; apt-get install python3-venv, then run make again")

    cuda, why = choose_cuda()
    extra, torch = WHEELS[cuda]
    made_for = f"Python {version}, {extra}\n"
    refresh = READY.is_file() and READY.read_text() == made_for and PYTHON.exists()
    READY.unlink(missing_ok=True)

    say(f"{'refreshing' if refresh else 'making'} .venv for {made_for.strip()}")
    if not refresh and not done(sys.executable, "-m", "venv", "--clear", VENV):
        fail(f"{sys.executable} could not make .venv; its message is above")

    if torch:
        say(f"{why}: CUDA {cuda} with a GPU build of torch, several GB")
    else:
        say(f"{why}: kernels compile through NVRTC and run on the CPU backend, with a CPU build of torch")
    if not install("-e", f".[dev,{extra}]", *filter(None, [torch])):
        fail("pip could not install the packages; its message is above. Mend that and run make again")
    if not torch and not install_torch_cpu():
        say("no CPU build of torch can be had here: tests and peers that need torch will be skipped")

    if not any(map(shutil.which, filter(None, [os.environ.get("CXX"), "g++", "clang++"]))):
        say("no C++ compiler found, which the CPU backend needs: apt-get install g++")
    READY.write_text(made_for)
    say(f"done in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nsetup: interrupted; the next make starts over")
