"""Zip files of a dataset's publisher: fetched over the network, checked, unpacked."""

from __future__ import annotations

import http.client
import shutil
import urllib.error
import urllib.request
import zipfile
import zlib
from pathlib import Path
from typing import Collection

from ...core.errors import UserError
from ...core.files import bar
from ...core.version import __version__

TIMEOUT = 30.0  # seconds without a byte
_CHUNK = 1 << 16


def fetch(url: str, path: Path, otherwise: str, timeout: float = TIMEOUT) -> None:
    """Copy a file from the network to ``path``, with a progress bar on a terminal; ``timeout`` is in seconds, for a
    connection and for each piece of the answer.

    Raises UserError if there is no connection, the server refuses, or the answer breaks off (``path`` may then be there
    in part); ``otherwise`` says what to do by hand then.
    """
    request = urllib.request.Request(url, headers={"User-Agent": f"fedcl_bench/{__version__}"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer, open(path, "wb") as file:
            size = int(answer.headers.get("Content-Length") or 0)
            with bar(f"fetching {url.rsplit('/', 1)[-1]}", size or None, "bytes") as advance:
                got = 0
                while piece := answer.read(_CHUNK):
                    file.write(piece)
                    got += len(piece)
                    advance(len(piece))
        reason = f"it broke off after {got:,} of {size:,} bytes" if got < size else ""
    except urllib.error.HTTPError as error:
        reason = f"the server answers {error.code} {error.reason}"
    except urllib.error.URLError as error:
        reason = f"no connection: {getattr(error.reason, 'strerror', None) or error.reason}"
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if reason:
        raise UserError(f"{url}: cannot be fetched ({reason}).\n{otherwise}")


def unpack(path: Path, label: str, folder: Path, wanted: Collection[str]) -> None:
    """Unpack the members whose file names (without folders) are ``wanted`` straight into ``folder``.

    A member's own path is never followed, so none can be written elsewhere. Of several members of one name, the one
    nearest to the top of the archive counts. Messages call the file ``label``. Raises UserError if the file is not a
    zip or is damaged (zip members carry checksums of their own), or if there is no room for what is in it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = [(member.filename.replace("\\", "/").split("/"), member) for member in archive.infolist()]
            members.sort(key=lambda each: -len(each[0]))
            nearest = {parts[-1]: member for parts, member in members if parts[-1] in wanted}
            for name, member in nearest.items():
                with archive.open(member) as source, open(folder / name, "wb") as target:
                    shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        with open(path, "rb") as file:
            start = file.read(24)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{label}: is not a whole zip file ({reason}; it begins with {start!r}).\nIt may have been cut "
                        f"short, or be a page sent in its place.") from None
    except OSError as error:
        raise UserError(f"{label}: cannot be unpacked into {folder} ({error.strerror}); choose another folder with "
                        f"TMPDIR=DIR.") from None
