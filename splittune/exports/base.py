"""What an export is, and the words that all of them share."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from splittune.config.data import ConfigData
from splittune.config.files import write_atomically
from splittune.errors import ConfigError
from splittune.split import BatchSplit

_PLAIN = re.compile(r"[\w.+-]+")
_CUDA = re.compile(r"cuda:(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that trains, and what is known of it."""

    name: str
    """As it is named in ``--to``."""
    distribution: str
    """As pip has it."""
    tried_with: str
    """The release that has read such an export, in this project's tests."""
    file_name: str
    """What the export is called unless told otherwise."""
    divides_loss: str
    """Who divides the loss by the accumulation steps, a sentence."""

    @property
    def installed(self) -> str | None:
        """The release that is installed here; None where it is not."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None

    def about_installed(self) -> str:
        """A sentence where the release here is another than the tried one, or none: empty otherwise."""
        here = self.installed
        if here is None:
            return f"{self.distribution} is not installed here: pip install {self.distribution}=={self.tried_with}"
        if here.partition("+")[0] != self.tried_with:
            return f"{self.distribution} {here} is installed here; the export was tried with {self.tried_with}."
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What a tool reads of a config: a file's text, the split that it sets, and what to know of it."""

    tool: Tool
    text: str
    """The file, its first lines saying what it is; the same for the same config and trials."""
    split: BatchSplit
    """The split that the tool will run: the winner, or the fastest even one that was measured."""
    notes: tuple[str, ...]
    """What a user should know, a sentence each; they stand in the text too."""

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the text, whole or not at all, and return the path.

        Raises:
            ConfigError: something is there and `force` is not given, or it cannot be written there.
        """
        target = Path(path)
        if target.is_dir():
            raise ConfigError(f"{target} is a folder: expected the path of a file, such as {target / self.file_name}.")
        if target.exists() and not force:
            raise ConfigError(
                f"{target} is there already: expected a path where nothing is. Use another one (--out), or write over "
                "it (--force, or save(path, force=True))."
            )
        return write_atomically(target, self.text)

    @property
    def file_name(self) -> str:
        """What the file is called unless told otherwise."""
        return self.tool.file_name


def head_of(config: ConfigData, tool: Tool, notes: Sequence[str]) -> list[str]:
    """The first lines of an export: who wrote it, what it was tried with, and the notes."""
    writer = config.versions.get("splittune", "")
    known = f" {writer}" if _PLAIN.fullmatch(writer) else ""  # it comes from a file, and goes into what is run
    return [
        f"{tool.name} settings of a config that splittune{known} tuned.",
        f"Tried with {tool.distribution} {tool.tried_with}.",
        *notes,
    ]


def found(config: ConfigData) -> str:
    """How the config's figures came about: "modelled" or "measured"."""
    return "modelled" if config.is_modelled else "measured"


def commented(lines: Sequence[str]) -> str:
    """Each line as a comment of Python, YAML or a shell, in lines of 100 columns."""
    return "".join(f"# {part}\n" for line in lines for part in wrapped(line, 98))


def wrapped(line: str, width: int = 100) -> list[str]:
    """`line` in parts of at most `width` columns; what is indented, code, stays whole."""
    return [line] if line.startswith(" ") else textwrap.wrap(line, width, break_long_words=False)


def visible_devices(config: ConfigData) -> str:
    """``"CUDA_VISIBLE_DEVICES=1,0 "`` where the tuned cards are others than the first ones in order; else empty."""
    numbers = card_numbers(config)
    if numbers is None or numbers == list(range(len(numbers))):
        return ""
    return f"CUDA_VISIBLE_DEVICES={','.join(map(str, numbers))} "


def card_numbers(config: ConfigData) -> list[int] | None:
    """The tuned CUDA cards' numbers, in the order of the shares; None where they are virtual or others."""
    found = [_CUDA.fullmatch(device.torch_device) for device in config.devices]
    if config.virtual_spec is not None or not all(found):
        return None
    return [int(match[1]) for match in found if match]


def note_on_ranks(config: ConfigData, tool: Tool) -> tuple[str, ...]:
    """What is not known where one process was measured and the tool starts one for each card."""
    if config.strategy == "ddp" or config.split.num_devices == 1:
        return ()
    sentence = (
        f"This was {found(config)} in one process for all cards; {tool.name} starts a process for each, which also "
        "holds the optimizer's state. The gradients are the same; its speed and memory are not known: `splittune plan "
        "--strategy ddp` foretells them."
    )
    return (sentence,)
