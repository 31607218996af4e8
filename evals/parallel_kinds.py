"""Models of every kind of block and every format of weights on ranks: the tokens of one process?

    python -m personae.evals.parallel_kinds [--only PART] [--processes]

A row of the table is a tiny random model, or a tiny checkpoint of a tool that quantizes, in float32. A column
is how ranks share it, see `SIZES`. Each plays one batch: the base and adapters on all its modules, 64 greedy
and 64 drawn tokens each. A cell says "equal" if all tokens are those of one process, "refused" if such ranks
are refused with a sentence, and else how many sequences differ. Below the table are the sentences. The ranks
are threads, or with `--processes` the processes of a server. Exit code 1 if a sequence differs whose model
does not round a product's inputs to few bits: that makes much of the last bit of a sum.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from gguf import GGMLQuantizationType
from transformers.utils.logging import disable_progress_bar

from personae.engine.loader import load_model
from personae.engine.quantization import KEPT, QUANTIZATIONS
from personae.errors import LoadError, ModelLoadError
from personae.evals.kernels import support

TOKENS = 64
TINY = ("llama", "qwen2", "phi3", "gemma3", "olmo2", "mixtral")
FAMILIES = (
    "cohere",  # both halves of a layer in parallel
    "starcoder2",  # an MLP without a gate, layer norms
    "qwen2_moe",  # shared experts, weighed
    "glm4_moe",  # a router that chooses groups
    "gpt_oss",  # experts with biases, attention with sinks
    "llama4",  # experts' weights multiply their inputs
    "deepseek_v3",  # latent attention
    "qwen3_next",  # gated attention, delta nets
    "lfm2",  # short convolutions
    "granitemoehybrid, Mamba",
    "falcon_h1",  # attention and Mamba in one block
    "nemotron_h, latent experts",  # layers of one block
    "gemma4",  # keys of other layers, embeddings of each layer
    "gemma4, experts",  # an MLP and experts
    "gemma3n",  # several residual streams
)


class Size(NamedTuple):
    """How ranks share a model: `ranks` in each of the `stages`, in so many `groups` for experts. `attention`:
    so many ranks have attention, for sequences of their own. `halves`: those of a step take turns."""

    ranks: int = 1
    stages: int = 1
    groups: int = 1
    attention: int = 0
    halves: bool = False


SIZES = {
    "TP 2": Size(2),
    "TP 4": Size(4),
    "PP 2": Size(stages=2),
    "TP 2 x PP 2": Size(2, 2),
    "EP 2": Size(2, groups=2),
    "EP 4": Size(4, groups=4),
    "TP 4, EP 2": Size(4, groups=2),
    "DP attention 2": Size(2, attention=2),
    "the same, EP 2": Size(2, groups=2, attention=2),
    "attention 1, MLPs 1": Size(2, attention=1),
    "attention 2, EP 2": Size(4, groups=2, attention=2),
    "the same, halves": Size(4, groups=2, attention=2, halves=True),
}


class Member(NamedTuple):
    """A row. `plain`: the folder of the same model that PEFT reads, to make adapters."""

    name: str
    model: Path
    plain: Path
    quantize: str | None = None


def members(only: str, work: Path) -> Iterator[Member]:
    """The rows whose name contains `only`, made below `work`."""
    tiny, families = support("tiny_models"), support("family_models")
    checkpoints, gguf_files = support("quantized_checkpoints"), support("gguf_files")
    for family in TINY:
        if only in family:
            folder = tiny.model_folder(family)
            yield Member(family, folder, folder)
    for case in FAMILIES:
        if only in case:
            folder = families.make_family_folder(work / case, case)
            yield Member(case, folder, folder)
    experts: dict[str, Any] = {"num_experts": 8, "num_key_value_heads": 2}
    dense: dict[str, Any] = {}
    for family, sizes in (("llama", dense), ("qwen3_moe", experts)):
        for quantize in (None, *QUANTIZATIONS):
            name = f"{family}, --quantize {quantize}" if quantize else family
            if only in name and name != "llama":
                folder = tiny.model_folder(family, intermediate_size=128, **sizes)
                yield Member(name, folder, folder, quantize)
    for kind in KEPT:
        name, type = f"llama, GGUF {kind}", GGMLQuantizationType[kind]
        if only in name:
            folder = tiny.model_folder(hidden_size=256, head_dim=128, intermediate_size=1024)
            path = work / f"{kind}.gguf"
            yield Member(name, gguf_files.write_gguf(path, folder, type), folder)
    for kind in ("Q8_0", "Q4_K", "MXFP4"):
        name, type = f"qwen3_moe, GGUF {kind}", GGMLQuantizationType[kind]
        if only in name:
            folder = tiny.model_folder(
                "qwen3_moe", hidden_size=256, head_dim=128, moe_intermediate_size=512, **experts
            )
            path = work / f"experts {kind}.gguf"
            yield Member(name, gguf_files.write_gguf(path, folder, type), folder)
    for checkpoint in checkpoints.NAMES:
        if only in checkpoint:
            yield Member(checkpoint, checkpoints.DATA / checkpoint, checkpoints.plain(checkpoint))


def adapters_of(member: Member, work: Path) -> dict[str, Path]:
    """Two adapters on all modules of the model, by name."""
    checks = support("family_checks")
    config = load_model(member.plain, device=torch.device("cpu")).config
    found = {}
    for name, adapted in checks.adapted(member.plain, config):
        found[name] = work / name
        adapted.save_pretrained(found[name])
    return found


@contextmanager
def engine(member: Member, adapters: dict[str, Path], size: Size, *, processes: bool) -> Iterator[Any]:
    """An engine of such a size. Raises LoadError if that is refused."""
    if not processes:
        yield support("engine_harness").EngineHarness(
            member.model,
            adapters,
            max_model_len=256,
            quantize=member.quantize,
            shared=size != Size(),
            ranks=size.ranks,
            stages=size.stages,
            expert_groups=size.groups,
            attention_ranks=size.attention,
            two_batches=size.halves,
        )
        return
    made = support("assembled").Assembled(
        member.model,
        adapters,
        ranks=size.ranks,
        max_model_len=256,
        quantize=member.quantize,
        pipeline_parallel_size=size.stages,
        expert_parallel_size=size.groups,
        enable_dp_attention=size.attention > 0,
        attention_ranks=size.attention if 0 < size.attention < size.ranks else None,
        enable_two_batch_overlap=size.halves,
        kv_memory=2**24,
    )
    try:
        yield made
    finally:
        made.end()


def answers(made: Any) -> dict[str, list[int]]:
    """The tokens of one batch: greedy and drawn ones of the base and of each adapter."""
    logs = [
        made.log(
            f"{name} {temperature}",
            range(5 + number, 30),
            name,
            temperature=temperature,
            seed=number,
            max_tokens=TOKENS,
            ignore_eos=True,
        )
        for number, name in enumerate((None, *made.digests))
        for temperature in (0.0, 1.0)
    ]
    return {id: played.tokens for id, played in made.play(logs).items()}


def main(
    only: Annotated[str, typer.Option(help="A part of the names of the rows; empty: all.")] = "",
    processes: Annotated[bool, typer.Option("--processes", help="Ranks are processes.")] = False,
) -> None:
    """Print the table."""
    disable_progress_bar()
    refused: dict[str, None] = {}
    different = 0
    print(f"| model | {' | '.join(SIZES)} |\n|---|{'---|' * len(SIZES)}")
    with tempfile.TemporaryDirectory() as folder:
        for number, member in enumerate(members(only, Path(folder))):
            adapters = adapters_of(member, Path(folder) / f"{number}")
            with engine(member, adapters, Size(), processes=False) as made:
                expected = answers(made)
                layers = made.ranks[0].model.layers
            rounds = any(linear.method.rounds_inputs for layer in layers for linear in layer.linears())
            cells = []
            for size in SIZES.values():
                try:
                    with engine(member, adapters, size, processes=processes) as made:
                        found = answers(made)
                except (LoadError, ModelLoadError) as error:
                    refused[error.message] = None
                    cells.append("refused")
                    continue
                differ = sum(found[id] != tokens for id, tokens in expected.items())
                different += 0 if rounds else differ
                cells.append(f"{differ} of {len(expected)} DIFFER" if differ else "equal")
            name = f"{member.name} (rounds inputs)" if rounds else member.name
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print("\nRefused:", *refused, sep="\n- ")
    raise typer.Exit(int(different > 0))


if __name__ == "__main__":
    typer.run(main)
