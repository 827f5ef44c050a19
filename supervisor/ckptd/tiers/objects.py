"""Checkpoints on an object store, through fsspec: S3 and its like; `file://` and `memory://` for trying things out.

There is no rename: the files of a copy lie under their final names, and a checkpoint exists once its COMMITTED does.
So a deletion takes COMMITTED first.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import posixpath
from collections.abc import Callable, Iterator
from typing import Any, Final

from ckptd.tiers.base import CHUNK, Damaged, NoSuchFile, Reader, StoreError, Writer
from ckptd_shim import contract

CONNECT_TIMEOUT_S: Final = 15
READ_TIMEOUT_S: Final = 60
"""Of one request; what a whole copy may take is bounded by its progress."""
PART: Final = 16 << 20
"""Bytes of one part of an upload: what is held in memory, and 10,000 parts make 156 GiB, more than any file of ours."""

_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "s3": {
        "config_kwargs": {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            "retries": {"max_attempts": 3, "mode": "standard"},
        },
        "use_listings_cache": False,
    },
    "file": {"auto_mkdir": True},
}
EXTRA_OF: Final = {"s3": "s3", "s3a": "s3"}
"""Scheme -> the extra of ckptd that brings what it needs."""


def scheme_of(url: str) -> str:
    """The part of a URL before `://`, in lower case."""
    return url.partition("://")[0].lower()


def why_unusable(url: str) -> str | None:
    """Why no store can be opened for a URL, and what to do; None: its scheme is known and what it needs is installed."""
    import fsspec

    scheme = scheme_of(url)
    if scheme not in fsspec.available_protocols():
        return f"there is no object store {scheme!r}; give s3://bucket/prefix, or another scheme that fsspec knows"
    try:
        fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        extra = EXTRA_OF.get(scheme)
        what = f'pip install "ckptd[{extra}]"' if extra else f"install what it needs: {error}"
        return f"{scheme}:// cannot be used by this Python; {what}"
    return None


@functools.lru_cache(maxsize=16)
def _client(location: str, pid: int, environment: frozenset[tuple[str, str]]) -> tuple[Any, str]:  # noqa: ARG001  keys
    """(file system, path in it) of a location: making one takes up to seconds, and each holds connections.

    One of our own and not fsspec's: its cache knows nothing of credentials that came by the environment.
    """
    import fsspec

    scheme = scheme_of(location)
    options = {**_OPTIONS.get(EXTRA_OF.get(scheme, scheme), {}), "skip_instance_cache": True}
    fs, root = fsspec.core.url_to_fs(location, **options)
    return fs, str(root)


class ObjectStore:
    """A prefix `<tier url>/<run name>` of an object store. Credentials are the environment's."""

    renames = False

    def __init__(self, location: str) -> None:
        self.location = location.rstrip("/")
        self._root = ""
        self._opened: Any = None
        self._remote = scheme_of(location) not in ("file", "local", "memory")

    @property
    def _fs(self) -> Any:
        """The file system, opened at the first use: that alone may take a while, or fail."""
        if self._opened is None:
            environment = frozenset(item for item in os.environ.items() if item[0].startswith(("AWS_", "FSSPEC_")))
            with self._telling(self.location):
                self._opened, self._root = _client(self.location, os.getpid(), environment)
        self._opened.invalidate_cache()  # somebody else writes there, too
        return self._opened

    def _at(self, *parts: str) -> str:
        return posixpath.join(self._root, *parts)

    def _make_room(self, name: str) -> None:
        """Directories, where a store has them. A real one has none, and would make the bucket of a mistyped URL."""
        if not self._remote:
            self._fs.makedirs(self._at(name), exist_ok=True)

    def names(self) -> list[str]:
        fs = self._fs
        try:
            with self._telling(self.location):
                found = fs.ls(self._root, detail=False)
        except NoSuchFile:
            return []
        names = {posixpath.basename(str(each).rstrip("/")) for each in found}
        return sorted(name for name in names if contract.parse_checkpoint_dirname(name))

    def path(self, name: str) -> str:
        return f"{self.location}/{name}"

    def created(self, name: str) -> float:  # noqa: ARG002  an object store has no directories that were touched
        return 0.0

    def marker(self, name: str) -> bytes:
        fs = self._fs
        with self._telling(f"{self.path(name)}/{contract.COMMITTED}"):
            self._check_kind(name, contract.COMMITTED)
            return bytes(fs.cat_file(self._at(name, contract.COMMITTED)))

    def sizes(self, name: str) -> dict[str, int]:
        fs = self._fs
        with self._telling(self.path(name)):
            found = fs.ls(self._at(name), detail=True)
        return {
            posixpath.basename(str(each["name"]).rstrip("/")): int(each["size"] or 0) if each["type"] == "file" else -1
            for each in found
        }

    @contextlib.contextmanager
    def reading(self, name: str, file: str) -> Iterator[Reader]:
        fs = self._fs
        path = f"{self.path(name)}/{file}"
        # Read ahead by one chunk and keep nothing: the file is read once, from front to back.
        options = {"block_size": CHUNK, "cache_type": "readahead"} if self._remote else {}
        with self._telling(path):
            self._check_kind(name, file)
            opened = fs.open(self._at(name, file), "rb", **options)
        try:
            yield _Told(opened, self._telling, path)
        finally:
            with contextlib.suppress(Exception):
                opened.close()

    def free_bytes(self) -> int | None:
        return None

    def owner(self, name: str) -> str | None:
        fs = self._fs
        with self._telling(f"{self.path(name)}/{contract.OWNER}"):
            try:
                return bytes(fs.cat_file(self._at(name, contract.OWNER)))[:200].decode(errors="replace").strip() or None
            except FileNotFoundError:
                return None

    def bury(self, name: str) -> None:
        fs = self._fs
        with self._telling(self.path(name)), contextlib.suppress(FileNotFoundError):
            fs.rm_file(self._at(name, contract.COMMITTED))

    def delete(self, name: str) -> None:
        self.bury(name)
        fs = self._fs
        with self._telling(self.path(name)), contextlib.suppress(FileNotFoundError):
            fs.rm(self._at(name), recursive=True)
        self._abort_uploads(name)

    def clear(self) -> None:
        """What is half deleted has no COMMITTED, and goes as any that was never committed."""

    # --- a copy ---

    def begin(self, name: str, run_id: str) -> dict[str, int]:
        try:
            found = self.sizes(name)
        except NoSuchFile:
            found = {}
        self._abort_uploads(name)
        if found.pop(contract.COMMITTED, None) is not None:
            self.bury(name)  # it is being replaced: until the new one is whole there is none
        if contract.OWNER not in found:
            fs = self._fs
            with self._telling(f"{self.path(name)}/{contract.OWNER}"):
                self._make_room(name)
                fs.pipe_file(self._at(name, contract.OWNER), run_id.encode())
        return found

    @contextlib.contextmanager
    def writing(self, name: str, file: str) -> Iterator[Writer]:
        fs = self._fs
        path = f"{self.path(name)}/{file}"
        options = {"block_size": PART} if self._remote else {}
        with self._telling(path):
            self._make_room(name)
            opened = fs.open(self._at(name, file), "wb", **options)
        try:
            yield _Told(opened, self._telling, path)
            with self._telling(path):
                opened.close()
        except BaseException:
            # Closing an upload would complete it with what is there, as if that were all.
            with contextlib.suppress(Exception):
                if self._remote:
                    opened.discard()
                    opened.closed = True
                else:
                    opened.close()
            raise

    def copied(self, name: str, file: str) -> contextlib.AbstractContextManager[Reader]:
        return self.reading(name, file)

    def copied_sizes(self, name: str) -> dict[str, int]:
        return self.sizes(name)

    def drop(self, name: str, files: list[str]) -> None:
        fs = self._fs
        for file in files:
            with self._telling(f"{self.path(name)}/{file}"), contextlib.suppress(FileNotFoundError):
                fs.rm(self._at(name, file), recursive=True)

    def commit(self, name: str, marker: bytes) -> None:
        fs = self._fs
        with self._telling(f"{self.path(name)}/{contract.COMMITTED}"):
            fs.pipe_file(self._at(name, contract.COMMITTED), marker)
        if self.marker(name) != marker:
            self.drop(name, [contract.COMMITTED])
            raise StoreError(f"{self.path(name)}/{contract.COMMITTED} came back with other bytes than were written")

    def abandon(self, name: str) -> None:
        with contextlib.suppress(Exception):
            self.delete(name)

    def _abort_uploads(self, name: str) -> None:
        """Take back uploads that were killed: their parts are paid for, and no listing shows them.

        Only S3 has such; a store that does not let us see them keeps them, as its life-cycle rules say.
        """
        if EXTRA_OF.get(scheme_of(self.location)) != "s3":
            return
        fs = self._fs
        bucket, _, prefix = self._at(name).partition("/")
        with contextlib.suppress(Exception):
            begun = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
            for each in begun.get("Uploads", ()):
                fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=each["Key"], UploadId=each["UploadId"])

    def _check_kind(self, name: str, file: str) -> None:
        """Raise Damaged where something else than a file has its name, which can only be where objects are files."""
        if self._remote:
            return
        if self._opened.isfile(self._at(name)):
            raise Damaged(f"{self.path(name)} is no directory")
        at = self._at(name, file)
        if self._opened.exists(at) and not self._opened.isfile(at):
            raise Damaged(f"{self.path(name)}/{file} is no regular file")

    @contextlib.contextmanager
    def _telling(self, path: str) -> Iterator[None]:
        """Turn whatever a client library raises into a text that names the object."""
        try:
            yield
        except StoreError:
            raise
        except FileNotFoundError as error:
            raise NoSuchFile(f"{path} is not there", error.errno) from error
        except Exception as error:
            raise StoreError(f"{path}: {_said(error)}", getattr(error, "errno", None)) from error


class _Told:
    """An open object whose every error names it."""

    def __init__(
        self, opened: Any, telling: Callable[[str], contextlib.AbstractContextManager[None]], path: str
    ) -> None:
        self._opened, self._telling, self._path = opened, telling, path

    def readinto(self, buffer: memoryview, /) -> int:
        with self._telling(self._path):
            return int(self._opened.readinto(buffer))

    def write(self, data: memoryview, /) -> int:
        with self._telling(self._path):
            return int(self._opened.write(data))


def _said(error: Exception) -> str:
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
