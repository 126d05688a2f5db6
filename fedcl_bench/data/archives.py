"""Zip files of a dataset's publisher: fetched over the network, checked, unpacked."""

from __future__ import annotations

import hashlib
import http.client
import io
import shutil
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from pathlib import Path
from typing import Callable, Iterable, Sequence

import numpy as np

from ..errors import Corrupt, UserError
from ..files import bar
from ..names import shown
from ..version import __version__

TIMEOUT = 30.0  # seconds without a byte
MOST = 32 << 30  # bytes of a file that is fetched or unpacked; the largest of a publisher have a few gigabytes
RATIO = 100  # how much larger a member may be than it is packed; tables of numbers are packed to a fourth or so
_ANY_RATIO = 1 << 20  # bytes up to which the ratio does not matter
_CHUNK = 1 << 16


def fetch(url: str, path: Path, otherwise: str, timeout: float = TIMEOUT) -> None:
    """Copy a file from the network to ``path``, with a progress bar on a terminal.

    Args:
        otherwise: what to do by hand when it fails; ends the message.
        timeout: seconds to wait for a connection and for each piece of the answer.

    Raises:
        UserError: if there is no connection, it is not encrypted, the server refuses, or the answer breaks off or is
            larger than ``MOST``; ``path`` may then be there in part.
    """
    _require_https(url, otherwise)
    request = urllib.request.Request(url, headers={"User-Agent": f"fedcl_bench/{__version__}"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer, open(path, "wb") as file:
            _require_https(answer.url, otherwise)
            size = int(answer.headers.get("Content-Length") or 0)
            with bar(f"fetching {url.rsplit('/', 1)[-1]}", size or None, "bytes") as advance:
                got = 0
                while (piece := answer.read(_CHUNK)) and got <= MOST:
                    file.write(piece)
                    got += len(piece)
                    advance(len(piece))
        reason = (f"it is larger than {MOST >> 30} GiB" if got > MOST else
                  f"it broke off after {got:,} of {size:,} bytes" if got < size else "")
    except urllib.error.HTTPError as error:
        reason = f"the server answers {error.code} {error.reason}"
    except urllib.error.URLError as error:
        reason = f"no connection: {getattr(error.reason, 'strerror', None) or error.reason}"
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if reason:
        raise UserError(f"{url}: cannot be fetched ({reason}).\n{otherwise}")


def _require_https(url: str, otherwise: str) -> None:
    """Raise UserError unless nobody on the way can change what comes: it is encrypted, or from this machine."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in ("127.0.0.1", "localhost", "::1")):
        raise UserError(f"{url}: is not fetched, as its address is not https://.\n{otherwise}")


def digest(path: Path, algorithm: str) -> str:
    """A file's checksum in hexadecimal; raises UserError if it cannot be read."""
    result = hashlib.new(algorithm, usedforsecurity=False)
    try:
        with open(path, "rb") as file:
            while piece := file.read(1 << 20):
                result.update(piece)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from None
    return result.hexdigest()


def _require_size(label: str, members: Sequence[zipfile.ZipInfo], folder: Path) -> None:
    """Raise UserError if members would unpack to more than is believable or than fits; no more is ever written than
    their entries say."""
    require_ratio(label, members, "If you trust it, unpack it yourself and name the folder with --raw.")
    needed, free = sum(member.file_size for member in members), shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(f"{label}: would unpack to {needed:,} bytes, and {folder} has {free:,} left; choose another "
                        f"with TMPDIR=DIR.")


def require_ratio(label: str, members: Iterable[zipfile.ZipInfo], cure: str) -> None:
    """Raise UserError if a member would grow beyond what tables of numbers grow to."""
    for member in members:
        if member.file_size > MOST or (member.file_size > _ANY_RATIO
                                       and member.file_size > RATIO * member.compress_size):
            raise UserError(f"{label}: {shown(member.filename)} would unpack from {member.compress_size:,} to "
                            f"{member.file_size:,} bytes, accepted: at most {RATIO} times its size and {MOST >> 30} "
                            f"GiB.\n{cure}")


def arrays_of(content: bytes, label: str, cure: str) -> dict[str, np.ndarray]:
    """The arrays of an ``.npz`` file; raises UserError if it is none, or holds pickled objects."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            require_ratio(label, archive.infolist(), cure)
            return {name.removesuffix(".npy"): _array(archive.read(name)) for name in archive.namelist()}
    except UserError:
        raise
    except Exception:  # NumPy and zlib raise whatever their readers do
        raise Corrupt(f"{label}: is no .npz file of tables without pickled objects", cure) from None


def one_array(content: bytes, label: str, cure: str) -> np.ndarray:
    """The array of an ``.npy`` file; raises UserError if it is none, or holds pickled objects."""
    try:
        return _array(content)
    except Exception:  # likewise
        raise Corrupt(f"{label}: is no .npy file of numbers without pickled objects", cure) from None


def _array(content: bytes) -> np.ndarray:
    """An array from its bytes. As a member of an archive it has been read to its end, so that its checksum was
    compared."""
    file = io.BytesIO(content)
    array = np.load(file, allow_pickle=False)
    if file.read(1):
        raise ValueError("more bytes than the array has")
    return array


def unpack(path: Path, label: str, folder: Path, wanted: Callable[[str], bool]) -> None:
    """Unpack the members whose file name (without folders) is ``wanted`` straight into ``folder``.

    A member's own path is never followed, so none can be written elsewhere. Of several members of one name, the one
    nearest to the top of the archive counts. Before the first is unpacked, their sizes are looked at.

    Args:
        label: what messages call the file.

    Raises:
        UserError: if the file is not a zip or is damaged (zip members carry checksums of their own), or would unpack
            to more than a publisher's file can, or than there is room for.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = {}
            for member in archive.infolist():
                *parents, name = member.filename.replace("\\", "/").split("/")
                depth = len(parents)
                if wanted(name) and (name not in members or depth < members[name][0]):
                    members[name] = depth, member
            _require_size(label, [member for _, member in members.values()], folder)
            for name, (_, member) in members.items():
                with archive.open(member) as source, open(folder / name, "wb") as target:
                    while piece := source.read(1 << 20):
                        target.write(piece)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        with open(path, "rb") as file:
            start = file.read(24)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{label}: is not a whole zip file ({reason}; it begins with {start!r}).\nIt may have been cut "
                        f"short, or be a page sent in its place.") from None
    except OSError as error:
        raise UserError(f"{label}: cannot be unpacked ({error.strerror}).") from None
