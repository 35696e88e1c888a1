"""The hashes of files at URLs that this process read from start to end, so that none is read for its hash again."""

import hashlib
from collections import OrderedDict

_MAX_DIGESTS = 10_000
_digests: OrderedDict[tuple[str, str], str] = OrderedDict()


class ReadDigest:
    """Hashes what is read of a file, as long as it is read in order."""

    def __init__(self, url: str, version: str, size: int) -> None:
        self._key, self._size, self._offset = (url, version), size, 0
        self._sha256 = hashlib.sha256()

    def update(self, offset: int, data: memoryview) -> None:
        """Take the bytes at an offset."""
        if offset != self._offset:
            return
        self._sha256.update(data)
        self._offset += len(data)
        if self._offset == self._size:
            _digests[self._key] = self._sha256.hexdigest()
            if len(_digests) > _MAX_DIGESTS:
                _digests.popitem(last=False)


def digest_of_read(url: str, version: str) -> str:
    """The SHA-256 of a file that was read completely; "" if it was not."""
    return _digests.get((url, version), "")
