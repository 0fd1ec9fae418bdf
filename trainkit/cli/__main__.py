"""Runs the command line: ``accelerate launch -m trainkit.cli train ...``."""

from trainkit.cli import main

main()
