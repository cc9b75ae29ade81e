"""KV blocks as bytes that leave an engine: each behind a digest of its name and content, keyed with a secret."""

import hmac
from collections.abc import Iterator, Sequence
from hashlib import blake2b

DIGEST_BYTES = 32


class BlockRecords:
    """Seals blocks and opens them. What is damaged, belongs to another name, or was sealed with another secret does not
    open."""

    def __init__(self, secret: str) -> None:
        self._key = blake2b(secret.encode(), digest_size=DIGEST_BYTES).digest()

    def seal(self, name: bytes, content: bytes) -> bytes:
        return self._digest(name, content) + content

    def open(self, name: bytes, record: bytes) -> bytes | None:
        """Return the content of a record; None where it does not fit the name."""
        content = record[DIGEST_BYTES:]
        return content if hmac.compare_digest(record[:DIGEST_BYTES], self._digest(name, content)) else None

    def open_all(self, names: Sequence[bytes], data: bytes, size: int) -> Iterator[bytes]:
        """Yield the contents of records of `size` bytes each in a row, up to the first that does not fit its name."""
        step = DIGEST_BYTES + size
        for number, name in enumerate(names[: len(data) // step]):
            content = self.open(name, data[number * step : (number + 1) * step])
            if content is None:
                return
            yield content

    def _digest(self, name: bytes, content: bytes) -> bytes:
        return blake2b(name + content, digest_size=DIGEST_BYTES, key=self._key).digest()
