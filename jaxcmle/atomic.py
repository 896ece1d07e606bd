"""Files that are written whole or not at all."""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

__all__ = ["atomic_path"]


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str], tag: str | None = None) -> Iterator[Path]:
    """Yield a path to write to; it becomes `path` when all went well, and vanishes when not.

    The temporary file lies in the same folder and has the same suffix; `tag` is in its name, by
    default something random. What was at `path` before stays there, untouched, until the new file
    is complete and on the disk. A link is followed: its target is replaced, not the link.

    Example:
        >>> import pathlib, tempfile
        >>> from jaxcmle.atomic import atomic_path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "answer.txt")
        ...     with atomic_path(path) as temporary:
        ...         _ = temporary.write_text("42")
        ...     path.read_text()
        '42'
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(target.parent))
    if target.exists() and not (target.is_file() or target.is_dir()):
        # A device or a pipe, which would be replaced.
        raise OSError(errno.EINVAL, "is no regular file", str(target))
    temporary = target.with_name(f".{target.stem}-{tag or secrets.token_hex(4)}{target.suffix}")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        if target.exists():
            # Permissions of the old file, where there is one.
            os.chmod(temporary, target.stat().st_mode & 0o7777)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
