"""The command line: one file a command."""

from splittune.cli.app import main

__all__ = ["main"]
