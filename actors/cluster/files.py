"""The messages with which an engine requests an adapter's files from the frontend, on a connection of its
own."""

import re

from personae.actors.cluster.contact import ClusterMessage
from personae.lora.peft_names import CONFIG_FILE, TENSORS_FILE

FILES = (CONFIG_FILE, TENSORS_FILE)  # an adapter's files; no others are sent
PIECE = 2**18  # bytes
MAX_FILES_FRAME = 2**20
DIGEST = re.compile(r"[0-9a-f]{64}")  # of an adapter's content
START_KEY = re.compile(r"files-[0-9a-f]{64}")  # of the files of an adapter known at the start


class Want(ClusterMessage, frozen=True):
    """From the engine: send the files of the adapter with this key."""

    key: str


class FileBegins(ClusterMessage, frozen=True):
    """From the frontend: a file of this size follows, in pieces."""

    name: str
    size: int


class Piece(ClusterMessage, frozen=True):
    """From the frontend: the next bytes of the file."""

    data: bytes


class FileEnds(ClusterMessage, frozen=True):
    """From the frontend: the file is complete; the SHA-256 of its bytes in hex."""

    sha256: str


class AllSent(ClusterMessage, frozen=True):
    """From the frontend: all files of the adapter were sent."""


class NotSent(ClusterMessage, frozen=True):
    """From the frontend: why it sends no files."""

    why: str


Sent = FileBegins | Piece | FileEnds | AllSent | NotSent
