"""Correctness: test cases, reference results, the commands run, check and sanitize, error maps."""

__all__ = [
    "cases",
    "check",
    "error_map",
    "findings",
    "isolated",
    "references",
    "report",
    "sampled",
    "sanitize",
    "scores",
    "sequences",
    "suite",
    "trial",
]
