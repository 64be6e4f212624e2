"""Correctness: test cases, reference results, the commands run, check and sanitize, error maps."""

__all__ = [
    "bits",
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
