"""Is a directory still the one that it was? A run directory may be removed under the run that lives in it."""

from __future__ import annotations

import contextlib
import os


class Place:
    """A directory that is there now, known by itself and not by its name."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        # Held open, so that no other directory can be given its number.
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def gone(self) -> bool:
        """It was removed or renamed, or another one has its name. An error that says neither is no."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)
