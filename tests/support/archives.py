"""Archives of tar as bytes."""

import io
import tarfile
from collections.abc import Mapping


def tar_bytes(members: Mapping[str, bytes], format: int = tarfile.DEFAULT_FORMAT) -> bytes:
    """Return an archive with these files."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()
