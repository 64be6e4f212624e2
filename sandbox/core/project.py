"""Where the project is that the kernels belong to."""

from __future__ import annotations

from pathlib import Path

import kernels_cu

FOLDER = Path(kernels_cu.__path__[0]).resolve()  # of the kernels; what tools write goes beside it
