"""`python -m sandbox`."""

from .cli import main

main()
