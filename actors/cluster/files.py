"""What is said when an engine asks the frontend for an adapter's files, on a connection of its own."""

import re

from personae.actors.cluster.contact import ClusterMessage
from personae.lora.peft_names import CONFIG_FILE, TENSORS_FILE

FILES = (CONFIG_FILE, TENSORS_FILE)  # of an adapter; nothing else is sent
PIECE = 2**18  # bytes
MAX_FILES_FRAME = 2**20
DIGEST = re.compile(r"[0-9a-f]{64}")  # of an adapter's content
START_KEY = re.compile(r"files-[0-9a-f]{64}")  # of the files of one that is there from the start


class Want(ClusterMessage, frozen=True):
    """From the engine: send the files of this key, one after the other."""

    key: str


class FileBegins(ClusterMessage, frozen=True):
    """From the frontend: a file of this size follows in pieces."""

    name: str
    size: int


class Piece(ClusterMessage, frozen=True):
    """From the frontend: the next bytes of the file."""

    data: bytes


class FileEnds(ClusterMessage, frozen=True):
    """From the frontend: what the file's bytes were, by SHA-256 in hex."""

    sha256: str


class AllSent(ClusterMessage, frozen=True):
    """From the frontend: these were all files of the adapter."""


class NotSent(ClusterMessage, frozen=True):
    """From the frontend: why there are none."""

    why: str


Sent = FileBegins | Piece | FileEnds | AllSent | NotSent
