"""How fast are ragged batches? The grid `ragged` beside PyTorch's varlen_attn.

python experiments/016_ragged/run.py            needs a GPU; half a minute on an H200
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

OUT = Path(__file__).resolve().parent / "results.jsonl"


def main() -> int:
    options = ("fwd_wgmma", "--grid", "ragged", "--dtype", "bfloat16", "--peers", "varlen", "--out", str(OUT))
    return subprocess.run([sys.executable, "-m", "sandbox", "bench", *options], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
