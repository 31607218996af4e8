"""GGUF files that llama.cpp's own converter makes, against transformers.

    python -m personae.evals.gguf_families --converter FOLDER

For each family a tiny random model of transformers' own class is converted and loaded here; its logits are
compared with transformers' on the folder. llama.cpp's source comes with `pip download --no-binary :all:
llama-cpp-python`, in `vendor/llama.cpp`; its converter needs sentencepiece.

    --converter FOLDER    llama.cpp's folder
    --case glm4           one case; otherwise all
    --record              writes what the converter says of the models, for the tests
"""

import json
import random
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer

from personae.engine.loader import load_model
from personae.errors import ModelLoadError
from personae.evals.kernels import support

LARGEST = 1e-4  # relative error of logits


def main(
    converter: Annotated[Path, typer.Option(help="llama.cpp's folder.")],
    case: Annotated[str, typer.Option(help="The case; empty: all.")] = "",
    *,
    record: Annotated[bool, typer.Option(help="Write the tests' record.")] = False,
) -> None:
    """Checks the families and exits with 1 if one differs."""
    conversion, hf, paged = support("gguf_conversion"), support("hf"), support("paged")
    failed, found = [], {}
    for name in [case] if case else conversion.CASES:
        with tempfile.TemporaryDirectory() as base:
            folder = conversion.folder_of(name, Path(base) / "folder")
            prompt = random.Random(5).choices(range(support("tiny_models").VOCAB), k=60)
            truth = hf.hf_logits(hf.hf_model(folder), prompt)
            try:
                file = conversion.convert(converter, folder, Path(base) / "model.gguf")
                found[name] = conversion.metadata_of(file)
                decoder = load_model(file, device=torch.device("cpu"), dtype="float32")
                hidden, _ = paged.PagedSequences(decoder, page_size=8).forward({"a": prompt})
                error = max(map(hf.relative_error, decoder.logits(hidden).clone(), truth))
                said = f"{'passed' if error < LARGEST else 'FAILED'}: logits differ by at most {error:.1e}"
            except (RuntimeError, ModelLoadError) as wrong:
                said = f"FAILED: {wrong}"
        print(f"{name}: {said}", flush=True)
        failed += [] if said.startswith("passed") else [name]
    print(f"{len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")
    if record:
        conversion.RECORDED.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
