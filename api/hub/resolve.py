"""Replaces repositories of the Hub in the options by folders on this machine."""

from dataclasses import replace
from pathlib import Path

from personae.api.bundled import is_model
from personae.api.hub.download import fetched
from personae.api.hub.files import adapter_files, model_files
from personae.api.hub.names import HubName, adapter_source, hub_name
from personae.api.options import ServeOptions
from personae.errors import LoadError


def names_the_hub(options: ServeOptions) -> bool:
    """Whether anything has to come from the Hub."""
    models = (options.model, options.draft_model)
    if any(each is not None and not is_model(each) and hub_name(each) is not None for each in models):
        return True
    return any(isinstance(adapter_source(each).place, HubName) for each in options.adapters)


def on_disk(options: ServeOptions) -> ServeOptions:
    """The options with every repository downloaded, unless it is cached. The model and the adapters keep
    their names. Blocks as long as that takes. Raises LoadError."""
    try:
        adapters = tuple(_adapter(each) for each in options.adapters)
    except ValueError as error:
        raise LoadError(f"--adapters: {error}") from None
    draft = None if options.draft_model is None else _model(options.draft_model)
    options = replace(options, draft_model=draft, adapters=adapters)
    model = options.model
    if model is None or is_model(model) or (name := hub_name(model)) is None:
        return options
    served = options.served_model_name or name.repo
    return replace(options, model=_model(model), served_model_name=served)


def _model(given: Path) -> Path:
    """The folder or the GGUF file of a model that may be on the Hub."""
    if (name := hub_name(given)) is None:
        return given
    folder, files = fetched(name, model_files)
    return folder / files[0] if files[0].endswith(".gguf") else folder


def _adapter(given: Path) -> Path:
    """The value of `--adapters` as `DIR` or `NAME=DIR`."""
    name, place = adapter_source(given)
    if not isinstance(place, HubName):
        return given
    folder, _ = fetched(place, adapter_files)
    return Path(f"{name or place.repo}={folder}")
