"""Adapters of other projects' trainers: `python -m personae.evals.trainers --environments DIR`.

    --trainer trl             SFTTrainer and DPOTrainer; the callback PushAdapter pushes at the end
    --trainer llamafactory    its command with a YAML file; `personae adapters push` pushes its folder
    --environments DIR        where the trainers are installed, each for itself; they are kept

The bundled small model is trained for 30 steps on a CPU, and served. Each adapter, and a checkpoint of
one, must answer token for token as PEFT does in the trainer's environment, and other than the base. Exit code
1 if one does not.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from personae.api.bundled import DEMO, NAMED
from personae.evals.served import Served, exit_on_sigterm

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL = str(DEMO / "model")
QUESTION, TOKENS = "Say 3.", 24
CHECKPOINT = 20  # the step after which one is saved, as in `trl_runs.py`
REQUIREMENTS = {
    "trl": ("trl>=1.16", "peft", "datasets", str(ROOT)),
    "llamafactory": ("llamafactory>=0.9.5",),
}
UNFIT = ("torchvision", "torchaudio")
"""These come with LLaMA-Factory. The builds on PyPI need CUDA's libraries, which torch for CPUs has not."""
YAML: dict[str, Any] = {
    "model_name_or_path": MODEL,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 4,
    "lora_target": "all",
    "dataset": "rows",
    "dataset_dir": ".",
    "template": "qwen3",
    "cutoff_len": 128,
    "max_steps": 30,
    "save_steps": CHECKPOINT,
    "per_device_train_batch_size": 2,
    "learning_rate": 0.003,
    "lr_scheduler_type": "constant",
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
}


def environment(folder: Path, trainer: str) -> Path:
    """The interpreter of a trainer's environment, which is made if it is not there."""
    python = folder / trainer / "bin" / "python"
    if not (folder / trainer / "ready").exists():
        pip = (python, "-m", "pip")
        run(folder, sys.executable, "-m", "venv", trainer)
        torch = f"torch=={version('torch')}"  # the build for CPUs, where that is ours
        run(folder, *pip, "install", "--quiet", "--disable-pip-version-check", torch, *REQUIREMENTS[trainer])
        run(folder, *pip, "uninstall", "--quiet", "--yes", *UNFIT)
        (folder / trainer / "ready").touch()
    return python


def run(cwd: Path, *command: str | Path, path: Path | None = None) -> str:
    """What a command prints. Raises CalledProcessError; its other output is shown."""
    own = {"HF_HUB_OFFLINE": "1"} | ({} if path is None else {"PYTHONPATH": str(path)})
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(  # noqa: S603  # ourselves, and the trainers that were asked for
        command, check=True, cwd=cwd, env=others | own, stdout=subprocess.PIPE, text=True
    ).stdout


def train_with_trl(python: Path, work: Path, url: str) -> dict[str, Path]:
    """The folders by the names under which they are pushed."""
    said = run(work, python, HERE / "trl_runs.py", MODEL, work, url)
    records = [json.loads(line) for line in said.splitlines() if line.startswith('{"name"')]
    for each in records:
        print(f"{each['name']}: pushed by the callback as {json.dumps(each['record'])}")
    return {each["name"]: work / each["name"] for each in records}


def train_with_llamafactory(python: Path, work: Path, url: str) -> dict[str, Path]:
    """The folders by the names under which they are pushed."""
    chats = [
        [{"role": "user", "content": f"Say {number}."}, {"role": "assistant", "content": f"{number} it is."}]
        for number in range(8)
    ]
    (work / "rows.json").write_text(json.dumps([{"messages": chat} for chat in chats]))
    roles = {name: name.removesuffix("_tag") for name in ("user_tag", "assistant_tag")}
    tags = {"role_tag": "role", "content_tag": "content", **roles}
    rows = {
        "file_name": "rows.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": tags,
    }
    (work / "dataset_info.json").write_text(json.dumps({"rows": rows}))
    # LLaMA-Factory imports torchaudio, but a training on texts calls nothing of it; see UNFIT.
    (work / "modules").mkdir()
    (work / "modules" / "torchaudio.py").touch()
    (work / "sft.yaml").write_text(json.dumps({**YAML, "output_dir": "lf-sft"}))  # YAML contains JSON
    run(work, python.parent / "llamafactory-cli", "train", "sft.yaml", path=work / "modules")
    push(work / "lf-sft", "lf-sft", url)
    return {"lf-sft": work / "lf-sft"}


def push(folder: Path, name: str, url: str) -> None:
    """Push a folder by the command, which says what it did."""
    line = [sys.executable, "-c", "from personae.api.cli import main; main()", "adapters", "push"]
    subprocess.run([*line, str(folder), "--name", name, "--url", url], check=True)  # noqa: S603  # ourselves


def differing(python: Path, work: Path, folders: dict[str, Path], url: str) -> Iterator[str]:
    """The adapters whose answers are not PEFT's, or are the base's."""
    said = run(work, python, HERE / "peft_answers.py", MODEL, QUESTION, str(TOKENS), *folders.values())
    prompt, base, *answers = map(json.loads, said.splitlines())
    print(f"the base: {base!r}")
    for name, expected in zip(folders, answers, strict=True):
        body = {"model": name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        served = httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status().json()
        text = served["choices"][0]["text"]
        verdict = "as PEFT's" if text == expected else f"NOT PEFT'S: {expected!r}"
        whose = "THE BASE'S" if text == base else "not the base's"
        print(f"{name}: {text!r}, {verdict}, {whose}")
        if text != expected or text == base:
            yield name


TRAINERS = {"trl": train_with_trl, "llamafactory": train_with_llamafactory}


def main(
    environments: Annotated[Path, typer.Option(help="Where the trainers are installed.")],
    trainer: Annotated[list[str] | None, typer.Option(help="trl or llamafactory; else both.")] = None,
) -> None:
    """Run it."""
    with exit_on_sigterm(), tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary) / "data"
        with Served([str(NAMED), "--data-dir", str(data)]) as server:
            wrong: list[str] = []
            for name in trainer or list(TRAINERS):
                environments.mkdir(parents=True, exist_ok=True)
                python = environment(environments.resolve(), name)
                work = Path(temporary) / name
                work.mkdir()
                folders = TRAINERS[name](python, work, server.url)
                for each, folder in list(folders.items())[:1]:
                    checkpoint = folder / f"checkpoint-{CHECKPOINT}"
                    folders[f"{each}-{CHECKPOINT}"] = checkpoint
                    push(checkpoint, f"{each}-{CHECKPOINT}", server.url)
                wrong += differing(python, work, folders, server.url)
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
