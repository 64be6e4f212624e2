"""Create .venv with the wheels for this machine. Run by `make`; needs only the standard library.

With the argument `minimal` only what `sandbox run` needs: a third of the time. SANDBOX_CUDA=12, 13 or none overrides
the detected version.
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
# They describe the environment. Each is written last, so that it exists only after a complete set-up.
MINIMAL, READY = VENV / "minimal", VENV / "ready"

# CUDA major version -> extra for `sandbox run`, extra for everything, and the matching torch.
WHEELS = {
    "13": ("nvrtc13", "cuda13", "torch>=2.11"),
    "12": ("nvrtc12", "cuda12", "torch==2.10.*"),
    "none": ("nvrtc13", "nvrtc13", None),
}

# An exact version, because only `==…+cpu` selects a CPU build; a range would install gigabytes of CUDA packages.
TORCH_CPU = "torch==2.13.0"

CPU_BUILD = "kernels compile through NVRTC and run on the CPU backend, with a CPU build of torch"

# Runs in a subprocess, because a broken driver may hang or crash.
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
    """Run a command without stdin, so that it cannot prompt; returns whether it succeeded."""
    sink = subprocess.DEVNULL if quiet else None
    try:
        result = subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return result.returncode == 0


def install(*requirements: str, quiet: bool = False) -> bool:
    # Python compiles what is imported; compiling all files of torch takes longer than unpacking it.
    options = ("-qq", "--no-compile", "--no-input", "--disable-pip-version-check")
    return done(PYTHON, "-m", "pip", "install", *options, *requirements, quiet=quiet)


def choose_cuda() -> tuple[str, str]:
    """(key of WHEELS, reason)."""
    chosen = os.environ.get("SANDBOX_CUDA")
    if chosen:
        if chosen not in WHEELS:
            fail(f"SANDBOX_CUDA={chosen} is not supported: it must be 12, 13 or none")
        return chosen, "set by SANDBOX_CUDA"
    try:
        probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return "none", "the NVIDIA driver does not respond"
    if probe.returncode:
        return "none", "no NVIDIA driver found"
    error, version = map(int, probe.stdout.split())
    if error:
        return "none", f"the NVIDIA driver reports no GPU (cuInit: error {error})"
    why = f"the driver supports CUDA {version // 1000}.{version % 1000 // 10}"
    if version < 12000:
        return "none", f"{why}, which is too old: update it to 525 or newer, then `make setup`"
    return ("13" if version >= 13000 else "12"), why


def install_torch_cpu() -> bool:
    # macOS has CPU builds only, under the plain version.
    if install(TORCH_CPU + ("" if sys.platform == "darwin" else "+cpu"), quiet=True):
        return True
    # The configured package indexes have no CPU build; uv knows PyTorch's own index.
    uv = (PYTHON, "-m", "uv", "pip", "install", "--python", PYTHON, "--torch-backend=cpu", TORCH_CPU)
    return install("uv", quiet=True) and done(*uv, quiet=True, timeout=1800)


def main(minimal: bool) -> None:
    started = time.monotonic()
    version = sys.version.split()[0]
    if sys.version_info < (3, 11):  # noqa: UP036  (an older Python can run the script up to here)
        fail(f"Python {version} is not supported: 3.11 or later is required; try PYTHON=python3.12 make setup")
    if importlib.util.find_spec("ensurepip") is None:
        fail("this Python cannot create virtual environments: apt-get install python3-venv, then run make again")

    cuda, why = choose_cuda()
    nvrtc, extra, torch = WHEELS[cuda]
    made_for = f"Python {version}, {extra}\n"
    refresh = MINIMAL.is_file() and MINIMAL.read_text() == made_for and PYTHON.exists()
    for stamp in (MINIMAL, READY):
        stamp.unlink(missing_ok=True)

    say(f"{'updating' if refresh else 'creating'} .venv for {made_for.strip()}")
    if not refresh and not done(sys.executable, "-m", "venv", "--clear", VENV):
        fail(f"{sys.executable} could not create .venv; see its message above")

    if minimal:
        say(f"{why}: NVRTC and NumPy; the other targets and `make setup` install the rest")
        packages = [f".[{nvrtc}]"]
    else:
        packages = [f".[dev,{extra}]", *filter(None, [torch])]
        build = f"CUDA {cuda} with a GPU build of torch, several GB" if torch else CPU_BUILD
        say(f"{why}: {build}")
    if not install("-e", *packages):
        fail("pip could not install the packages; see its message above, then run make again")
    if not minimal and not torch and not install_torch_cpu():
        say("a CPU build of torch is not available: tests and peers that need torch will be skipped")

    if not any(map(shutil.which, filter(None, [os.environ.get("CXX"), "g++", "clang++"]))):
        say("the CPU backend needs a C++ compiler and none was found: apt-get install g++")
    for stamp in (MINIMAL,) if minimal else (MINIMAL, READY):
        stamp.write_text(made_for)
    say(f"done in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    try:
        main(minimal=sys.argv[1:] == ["minimal"])
    except KeyboardInterrupt:
        sys.exit("\nsetup: interrupted; the next make starts again")
