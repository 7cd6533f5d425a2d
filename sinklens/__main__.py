"""``python -m sinklens``."""

from sinklens.cli import main

main()
