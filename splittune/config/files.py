"""Writing a file so that nobody ever reads half of it."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

from splittune.errors import ConfigError


def write_atomically(path: str | os.PathLike[str], text: str) -> Path:
    """Put `text` (UTF-8, line ends as they are) in the file at `path`, whole or not at all; returns the path.

    A temporary file beside it is written, flushed to the disk and renamed over it, so an interruption, a full disk or a
    crash leaves the old file. Missing folders are made, and a link is followed.

    Raises:
        ConfigError: it cannot be written there; the message carries the operating system's reason.
    """
    target = Path(path).resolve()
    temporary = target.parent / f".{target.name}.{uuid4().hex}.tmp"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            # lone surrogates, as in a file name that is no text, are escaped rather than lose the whole file
            with temporary.open("x", encoding="utf-8", errors="backslashreplace", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write {os.fspath(path)}: {error.strerror or error}. Expected the path of a file in a folder that "
            "may be written to, with room for it. Choose another path, or mend what keeps this one from being written."
        ) from error
    return Path(path)


def read_text(path: str | os.PathLike[str], advice: str) -> str:
    """What the file at `path` holds; `advice` ends the message of one that is damaged.

    Raises:
        ConfigError: it cannot be read, or is no UTF-8 text.
    """
    try:
        return Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read {os.fspath(path)}: {error.strerror or error}. Expected the folder that `splittune tune` or "
            "`splittune plan` wrote, such as runs/split. Is the path right?"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{os.fspath(path)} is no UTF-8 text: {error}. {advice}") from error


def check_writable(folder: str | os.PathLike[str]) -> None:
    """Make `folder` and try it, before hours are spent on what is to be written there.

    Raises:
        ConfigError: it cannot be made or written to, or is a file.
    """
    if Path(folder).is_file():
        raise ConfigError(f"{os.fspath(folder)} is a file: expected a folder to write to. Name another one.")
    write_atomically(Path(folder) / ".writable", "").unlink()
