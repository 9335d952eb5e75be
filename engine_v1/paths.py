"""Where the engine may keep files between runs: downloaded models, compiled kernels."""

import contextlib
import os
import tempfile
from pathlib import Path


def cache_root() -> Path | None:
    """Return the directory for the engine's files, created if need be, or None where none is writable.

    The first of these that can be written to: `$ENGINE_V1_CACHE`, `$XDG_CACHE_HOME/engine_v1`, `~/.cache/engine_v1`.
    A set `ENGINE_V1_CACHE` is the only candidate: a user who names a place does not want files elsewhere.

    Returns:
        An existing, writable directory, or None (read-only homes are normal in containers).
    """
    named = os.environ.get("ENGINE_V1_CACHE")
    if named:
        candidates = [Path(named).expanduser()]
    else:
        xdg = os.environ.get("XDG_CACHE_HOME")
        candidates = [Path(xdg) / "engine_v1"] if xdg else []
        with contextlib.suppress(RuntimeError):  # a user id without a home, as containers have
            candidates.append(Path.home() / ".cache" / "engine_v1")
    return next((path for path in candidates if is_writable_directory(path)), None)


def is_writable_directory(path: Path) -> bool:
    """Create `path` and say whether a file can be made in it.

    Permission bits are not enough to know: a read-only mount and a full quota show themselves on writing only.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False
