"""The tier on a disk: files of many pages, which survive the process.

    FOLDER/IDENTITY/NUMBER/lock            locked by the engine that has this part open
    FOLDER/IDENTITY/NUMBER/pages-00000.kv  slots of equal size, each a header and a page

The header says what the page is (`page_header.py`). So a page that is torn, damaged or of another model is
never used: it is computed. A page that is no longer needed is overwritten: the least recently used one of the
tenant that has the most for its weight.

Whatever fails is logged in one sentence and counted. Requests are computed as without a tier.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np

from personae.engine.plan import PageKey, PageOwner
from personae.engine.tiers.page_header import (
    DIGEST_BYTES,
    PageHeader,
    header_bytes,
    pack_header,
    unpack_header,
)
from personae.engine.tiers.page_index import PageIndex
from personae.engine.tiers.tier import PageBytes, PageFetch
from personae.engine.tiers.writer import WriterTier
from personae.kernels.sizes import size_text

FILE_BYTES = 64 * 2**20  # of a file, about
RETRY_SECONDS = 30.0  # without writes after one has failed

_ALIGNMENT = 512
_IDENTITY_NAME = re.compile(r"[0-9a-f]{32}")


class DiskTier(WriterTier):
    """Implements `Tier` in `folder`, with at most `bound` bytes there, in pages of `page_bytes`.

    `identity` says what else decides a page's content. Up to `parts` engines may use the folder at once, each
    with its part of the bound. `token_bytes` is the longest `PageKey.tokens`.
    """

    def __init__(
        self,
        folder: Path,
        bound: int,
        page_bytes: int,
        identity: str,
        *,
        parts: int = 1,
        token_bytes: int = 512,
    ) -> None:
        super().__init__(page_bytes, "kv-disk")
        self._header_bytes = -(-header_bytes(token_bytes) // _ALIGNMENT) * _ALIGNMENT
        self._slot_bytes = -(-(self._header_bytes + page_bytes) // _ALIGNMENT) * _ALIGNMENT
        self._slots_of_a_file = max(FILE_BYTES // self._slot_bytes, 1)
        self._capacity = bound // parts // self._slot_bytes
        digest = hashlib.sha256(f"{identity} {page_bytes} {self._slot_bytes}".encode()).digest()
        self._identity = digest[:DIGEST_BYTES]
        self._index = PageIndex[int]()  # slots by name
        self._free: list[int] = []
        self._used = 0  # slots below this one have been given out
        self._files: list[int] = []
        self._writes = 0
        self._part: Path | None = None
        self._part_lock = -1
        self.scanned = threading.Event()  # the index is complete
        if not self._capacity:
            self._report(f"--kv-disk-bytes is too small: a page takes {size_text(self._slot_bytes)}")
            self.scanned.set()
            return
        try:
            self._open = self._lock_part(folder, parts)
        except OSError as error:
            self._report(f"--kv-disk cannot be used, prompts are computed: {error}")
        if self._open:
            self._writer.start()
        else:
            self.scanned.set()

    # Opening

    def _lock_part(self, folder: Path, parts: int) -> bool:
        """Lock a part of the folder. False if others have all of them. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = folder / self._identity.hex()
        own.mkdir(mode=0o700, exist_ok=True)
        for number in range(parts):
            part = own / str(number)
            part.mkdir(mode=0o700, exist_ok=True)
            lock = _locked(part)
            if lock is not None:
                self._part, self._part_lock = part, lock
                break
        else:
            self._report(f"another server uses {folder}; prompts are computed")
            return False
        with suppress(OSError):  # then they stay
            for other in folder.iterdir():
                if other != own and _IDENTITY_NAME.fullmatch(other.name):
                    _delete_unused(other)
        return True

    def _scan(self) -> None:
        """Find the pages of an earlier process. Raises OSError."""
        assert self._part is not None
        found: list[tuple[PageHeader, int]] = []
        files = -(-self._capacity // self._slots_of_a_file)
        for path in sorted(self._part.glob("pages-*.kv")):
            if path.name not in {f"pages-{len(self._files):05}.kv"} or len(self._files) >= files:
                path.unlink()  # beyond the bound, or behind a gap
                continue
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            self._files.append(file)
            first = (len(self._files) - 1) * self._slots_of_a_file
            unused = self._slot_bytes - self._header_bytes - self.page_bytes  # at the end of a slot
            whole = (os.fstat(file).st_size + unused) // self._slot_bytes
            count = min(whole, self._slots_of_a_file, self._capacity - first)
            for slot in range(first, first + count):
                data = os.pread(file, self._header_bytes, self._offset(slot))
                header = unpack_header(self._identity, data)
                if header is None:
                    self._free.append(slot)
                else:
                    found.append((header, slot))
            self._free += range(first + count, min(first + self._slots_of_a_file, self._capacity))
        self._used = min(len(self._files) * self._slots_of_a_file, self._capacity)
        found.sort()
        with self._lock:
            for header, slot in found:
                self._writes = header.number + 1
                if (older := self._index.add(header.key.name, slot, header.owner)) is not None:
                    self._free.append(older)

    def _offset(self, slot: int) -> int:
        return slot % self._slots_of_a_file * self._slot_bytes

    # What the scheduler asks

    @property
    def pages(self) -> int:
        """See TierIndex."""
        return len(self._index)

    def has(self, name: bytes, source: str | None = None) -> bool:
        """See TierIndex."""
        return name in self._index

    def wants(self, name: bytes) -> bool:
        """See TierIndex."""
        return name not in self._index

    # Fetching

    def fetch(self, fetch: PageFetch) -> int:
        """See Tier."""
        if not self._wants(fetch.ticket):
            return 0
        keys, count = fetch.keys, 0
        with self._fetch_into(fetch.ticket, len(keys)) as got:
            pages = np.empty((len(keys), self.page_bytes), np.uint8)
            for key, page in zip(keys, pages, strict=True):
                if not self._read(key, page):
                    break
                count += 1
            if count:
                got.append(pages[:count])
        with self._lock:
            for key in reversed(keys[:count]):  # a page is not needed longer than those before it
                self._index.use(key.name)
        return count

    def _read(self, key: PageKey, page: PageBytes) -> bool:
        """Read a page, and check that it is the right one and whole."""
        slot = self._index.get(key.name)
        if slot is None:
            return False
        header = bytearray(self._header_bytes)
        try:
            file = self._files[slot // self._slots_of_a_file]
            read = os.preadv(file, [header, page.data], self._offset(slot))
        except OSError as error:
            self._report(f"a page cannot be read from --kv-disk, it is computed: {error}")
            read = 0
        if read == self._header_bytes + self.page_bytes:
            found = unpack_header(self._identity, header)
            if found is not None and found.key == key and found.checksum == zlib.crc32(page.data):
                return True
        with self._lock:
            if self._index.get(key.name) == slot:  # else it was overwritten meanwhile
                self._index.remove(key.name)
                self._free.append(slot)
                self._errors += 1
        return False

    # Writing

    def _prepare(self) -> None:
        try:
            self._scan()
        except OSError as error:
            self._report(f"the pages in --kv-disk cannot be read, prompts are computed: {error}")
        self.scanned.set()

    def _failed(self, error: OSError) -> None:
        self._silent_until = time.monotonic() + RETRY_SECONDS
        self._report(f"pages cannot be written to --kv-disk, prompts are computed: {error}")

    def _forget(self, tenant: bytes, session: bytes) -> None:
        """Overwrite the pages of a session with zeros."""
        with self._lock:
            slots = self._index.remove_session(tenant, session)
        for slot in slots:
            try:
                file = self._files[slot // self._slots_of_a_file]
                os.pwrite(file, bytes(self._slot_bytes), self._offset(slot))
            except OSError as error:
                self._report(f"pages of a deleted session stay in --kv-disk for a while: {error}")
            finally:
                with self._lock:
                    self._free.append(slot)

    def _write(self, key: PageKey, owner: PageOwner, page: PageBytes) -> None:
        """Write a page to a free slot. Raises OSError."""
        slot = self._free_slot(owner)
        if slot is None:
            return
        header = pack_header(self._identity, self._writes, key, owner, page)
        try:
            assert len(header) <= self._header_bytes, "token_bytes is too small"
            file = self._files[slot // self._slots_of_a_file]
            written = os.pwritev(
                file, [header.ljust(self._header_bytes, b"\0"), page.data], self._offset(slot)
            )
            if written != self._header_bytes + self.page_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except BaseException:
            self._free.append(slot)
            raise
        with self._lock:
            self._writes += 1
            self._stored += 1
            self._index.add(key.name, slot, owner)

    def _free_slot(self, owner: PageOwner) -> int | None:
        """A free slot for a page of this owner: of a new file, if the bound and the disk allow it, else that
        of a page that makes room."""
        with self._lock:
            if self._free:
                return self._free.pop()
        if self._used == len(self._files) * self._slots_of_a_file and self._used < self._capacity:
            self._add_file()
        with self._lock:
            if self._used < min(self._capacity, len(self._files) * self._slots_of_a_file):
                self._used += 1
                return self._used - 1
            return self._index.pop(owner)

    def _add_file(self) -> None:
        """Add a file, with all of its room on the disk. If the disk is full, the files there are all that
        there will be. Raises OSError."""
        assert self._part is not None
        slots = min(self._slots_of_a_file, self._capacity - self._used)
        path = self._part / f"pages-{len(self._files):05}.kv"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, slots * self._slot_bytes)
        except OSError as error:
            os.close(file)
            path.unlink()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or not self._files:
                raise
            self._capacity = self._used
            held = size_text(self._used * self._slot_bytes)
            self._report(f"the disk of --kv-disk is full; {held} of pages stay the most there: {error}")
            return
        self._files.append(file)

    def close(self) -> None:
        """See Tier."""
        if not self._open:
            return
        if not self._finish():
            return  # a disk that does not answer; the system closes the files
        for file in (*self._files, self._part_lock):
            with suppress(OSError):
                os.close(file)


def _locked(part: Path) -> int | None:
    """The open lock of a part; None if another process, or another engine of this one, has it."""
    file = os.open(part / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    except OSError:
        os.close(file)
        raise
    return file


def _delete_unused(folder: Path) -> None:
    """Delete the pages of another model, unless a server has them open: they can never be used here, and the
    bound holds for the whole folder."""
    for part in folder.iterdir():
        if part.is_symlink() or not (part / "lock").is_file():
            return
        lock = _locked(part)
        if lock is None:
            return
        os.close(lock)
    shutil.rmtree(folder, ignore_errors=True)
