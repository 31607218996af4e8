"""What the first rank tells the others: plain data in msgpack."""

from typing import Any

import msgspec

from personae.engine.parallel.expert_placement import ExpertGroups, Placement
from personae.engine.parallel.far_stages import FarLinks
from personae.engine.parallel.process_groups import Library
from personae.engine.plan import MemoryLayout, StepPlan
from personae.lora.source import AdapterSource


class StartRank(msgspec.Struct, frozen=True):
    """Load this rank's part of a model. The first fields are those of its `Comm`, the others of
    `load_model`. `device`: the type of this rank's, cpu or cuda. `version`: of the first rank's Personae.
    `weights`: the digest of the model's files as the first rank sees them. `links`: how it connects to stages
    on other machines. `library`: what carries what ranks exchange, None for shared memory; `store`: the port
    where they find each other then. It answers when it has loaded, and with a library once more when it has
    joined the others."""

    rank: int
    size: int
    stage: int
    stages: int
    expert_groups: ExpertGroups
    attention_ranks: int
    two_batches: bool
    device: str
    version: str
    model: str
    weights: str
    dtype: str
    quantize: str | None
    max_position: int | None
    links: FarLinks | None = None
    library: Library | None = None
    store: int = 0


class PoolSizes(msgspec.Struct, frozen=True):
    """The sizes of a rank's KV cache and of its adapter pool, which are those of every rank. `kv_dtype`: a
    dtype of torch by its name. `ranks`, `spare_ranks`: rank rows of adapters."""

    layout: MemoryLayout
    kv_dtype: str
    ranks: int
    spare_ranks: int
    max_adapters: int


class MeasureDevice(msgspec.Struct, frozen=True, tag=True):
    """Measure this rank's device, at the same time as all others: see `measured`. The answer is its
    `GpuMemory`, or what Answer says. `sizes`: None to run no step."""

    sizes: PoolSizes | None


class Build(msgspec.Struct, frozen=True, tag=True):
    """Allocate the caches. The answer is empty. Then, on a GPU, compile the kernels with all others."""

    sizes: PoolSizes


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Begin a step. `tokens`: by slot, the tokens (int64) of its row that the host knows. `guesses`: by row,
    its input and its drafts."""

    plan: StepPlan
    tokens: dict[int, bytes]
    guesses: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]


class RunForward(msgspec.Struct, frozen=True, tag=True):
    """Run the layers over the rows of the step that has begun."""


class Logits(msgspec.Struct, frozen=True, tag=True):
    """Compute the logits of the oldest step without."""


class PromptLogits(msgspec.Struct, frozen=True, tag=True):
    """Take part in computing the logits of prompt tokens; see `Worker.prompt_logits`."""

    slot: int
    first: int
    count: int


class Commit(msgspec.Struct, frozen=True, tag=True):
    """The newest tokens of slots."""

    slots: list[int]
    tokens: list[int]


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read an adapter. The answer is its `AdapterTicket.missing`. `files`: on another machine, the content of
    each of the source's folders, by the files' names."""

    digest: str
    source: AdapterSource
    files: tuple[dict[str, bytes], ...] | None = None


class OpenPieces(msgspec.Struct, frozen=True, tag=True):
    """Begin memory work that is done in pieces: placing the adapter that was loaded under this digest,
    lending these pages, returning them, or reading the experts that come to the rank with a layer's new
    placement. `work`: its number."""

    work: int
    place: str | None = None
    lend: tuple[int, ...] | None = None
    returned: tuple[int, ...] | None = None
    experts: tuple[int, Placement] | None = None


class NextPiece(msgspec.Struct, frozen=True, tag=True):
    """Do the next piece. The answer says whether there is another."""

    work: int


class Discard(msgspec.Struct, frozen=True, tag=True):
    """See `AdapterMemory.discard`."""

    digest: str


class Release(msgspec.Struct, frozen=True, tag=True):
    """See `AdapterMemory.release`."""

    digest: str


class ReturnPages(msgspec.Struct, frozen=True, tag=True):
    """See `AdapterMemory.recall`. The answer is the pages."""

    count: int


class AskExperts(msgspec.Struct, frozen=True, tag=True):
    """See `ExpertMemory.layers`, which is the answer."""


class PlaceExperts(msgspec.Struct, frozen=True, tag=True):
    """See `ExpertMemory.place`."""

    layer: int
    placement: Placement


ToRank = (
    MeasureDevice
    | Build
    | Begin
    | RunForward
    | Logits
    | PromptLogits
    | Commit
    | LoadAdapter
    | OpenPieces
    | NextPiece
    | Discard
    | Release
    | ReturnPages
    | AskExperts
    | PlaceExperts
)


class Answer(msgspec.Struct, frozen=True):
    """A rank's answer, or an error: the name of its class and its text. After a LoadError the rank ends."""

    value: Any = None
    error: tuple[str, str] | None = None


encode = msgspec.msgpack.Encoder().encode
decode_message: "msgspec.msgpack.Decoder[ToRank]" = msgspec.msgpack.Decoder(ToRank)
decode_answer: "msgspec.msgpack.Decoder[Answer]" = msgspec.msgpack.Decoder(Answer)
