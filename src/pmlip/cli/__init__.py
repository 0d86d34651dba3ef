"""The command line: parse, call, print."""

from pmlip.cli.main import app

__all__ = ["app"]
