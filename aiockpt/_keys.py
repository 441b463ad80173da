"""Names in a store, checked before anything is done with them. Pure text."""

from __future__ import annotations

import re

from .errors import UsageError

__all__ = ["check_filename", "check_key", "check_name", "check_save_id"]

_SAVE_ID = re.compile(r"[0-9a-f]{32}")


def check_filename(name: str) -> str:
    """Return `name` if it is one plain file name.

    Raises:
        UsageError: it is empty, `.` or `..`, or holds `/` or NUL.
    """
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise UsageError(f"not a file name: {name!r} (one name, without '/' or NUL, not '.' or '..')")
    return name


def check_name(name: str) -> str:
    """Return `name` if a step's folder may be called so.

    Raises:
        UsageError: it is no file name, or begins with a dot (those are hidden).
    """
    if check_filename(name).startswith("."):
        raise UsageError(f"not a name for a step: {name!r} begins with a dot")
    return name


def check_key(key: str, *, root: bool = False) -> str:
    """Return `key` if it is file names joined by `/` (with `root`, "" is fine too).

    Raises:
        UsageError: it is absolute, leaves the run, or a part is no file name.
    """
    if not (root and key == ""):
        for part in key.split("/"):
            if part in ("", ".", "..") or "\0" in part:
                raise UsageError(
                    f"not a key: {key!r} (relative, parts joined by '/', none empty, '.' or '..')"
                )
    return key


def check_save_id(save_id: str) -> str:
    """Return `save_id` if it is 32 lowercase hexadecimal digits.

    Raises:
        UsageError: it is not.
    """
    if not _SAVE_ID.fullmatch(save_id):
        raise UsageError(f"not a save id: {save_id!r} (32 lowercase hexadecimal digits)")
    return save_id
