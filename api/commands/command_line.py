"""What commands share: errors in one line, options of a running server, and options from a class of them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import typer
from typer.core import TyperCommand

from personae.api.options import GROUPS, Option, options_of
from personae.api.wire.compat_names import option_here
from personae.errors import EngineLost, LoadError, PersonaeError
from personae.grammar.fuzzy_match import nearest

P = ParamSpec("P")
T = TypeVar("T")

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
UrlOption = Annotated[str, typer.Option("--url", help="Where the server runs.")]
KeyOption = Annotated[
    str | None, typer.Option("--key", envvar="PERSONAE_API_KEY", help="Better given as PERSONAE_API_KEY.")
]

FAILED = 1
"""The exit code of a command that failed, or whose answer is no."""

UNUSABLE = 2
"""The exit code where the command line is wrong, as Click has it, or names what cannot be used."""

ENGINE_LOST = 3
"""The exit code of a server whose engine failed too often."""

_CONFIG = "config"
_Value = str | int | float | bool | None


def exit_code(error: PersonaeError) -> int:
    """The exit code of a command that ends with this error."""
    if isinstance(error, EngineLost):
        return ENGINE_LOST
    wrong_input = error.status == 400 and error.param is not None
    return UNUSABLE if wrong_input or isinstance(error, LoadError) else FAILED


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """A PersonaeError inside the block is printed as one line, and ends the command with its exit code."""
    try:
        yield
    except PersonaeError as error:
        typer.secho(f"error: {error.message}", fg=typer.colors.RED, err=True)
        raise typer.Exit(exit_code(error)) from None


def reporting(command: Callable[P, None]) -> Callable[P, None]:
    """The command, with its errors as one line and their exit codes."""

    @wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        with errors_in_one_line():
            command(*args, **kwargs)

    return guarded


class OptionsCommand(TyperCommand):
    """A command whose help shows its options by group, and that knows other servers' names for them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line. Ends with exit code 2 at an option of another server."""
        for arg in args:
            if (here := option_here(arg)) is not None:
                ctx.fail(f"No such option: {arg.partition('=')[0]}. {here}")
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            name = getattr(error.param, "name", None)
            source = name and ctx.get_parameter_source(name)
            if source and source.name == "DEFAULT_MAP":
                error.message = f"{error.message.rstrip('.')} (in {ctx.meta[_CONFIG]})."
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, the options of each group, and the other options."""
        records = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        arguments = [param.name for param in self.params if param.param_type_name == "argument"]
        sections = {"Arguments": [records.pop(name) for name in arguments]}
        for group in GROUPS:
            title = (group.__doc__ or "").rstrip(".")
            sections[title] = [records.pop(each.name) for each in options_of(group)]
        sections["Other"] = list(records.values())
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl([row for row in rows if row is not None])


def expand_options(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function: a parameter whose type is a class of options becomes those options."""
    hints: dict[str, Any] = get_type_hints(function)
    kinds: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[Parameter] = []
    for each in signature(function, eval_str=True).parameters.values():
        options = map(_parameter, options_of(kinds[each.name])) if each.name in kinds else [each]
        parameters += [one.replace(kind=Parameter.KEYWORD_ONLY) for one in options]

    @wraps(function)
    def command(**values: Any) -> None:
        arguments = {name: _made(kind, values) for name, kind in kinds.items()}
        function(**values, **arguments)

    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _made(kind: type, values: dict[str, Any]) -> Any:
    """The options of one class, from a command's values."""
    taken = {each.name: values.pop(each.name) for each in options_of(kind)}
    given = {name: value for name, value in taken.items() if value is not None}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def _parameter(each: Option) -> Parameter:
    """The parameter of a command for an option, as Typer understands it."""
    info, type, default = each.info, each.type, each.default
    several = next((part for part in (type, *get_args(type)) if get_origin(part) is tuple), None)
    if several is not None:
        type, default = list[get_args(several)[0]] | None, None  # type: ignore[misc]  # not known to mypy
    about: dict[str, Any] = {"help": info.help, "metavar": info.metavar}
    if info.unset is not None:
        about["show_default"] = info.unset
    if info.parse is not None:
        about["parser"] = option_parser(info.parse)
        type = type if several is not None else Any  # Typer refuses unions, and need not know it
    else:
        about |= {"min": info.min, "max": info.max}
    if info.check is not None:
        about["callback"] = option_parser(info.check)
    if info.folder:
        about |= {"exists": True, "file_okay": False}
    if each.name == "model":
        declared: Any = typer.Argument(**about)
    else:
        named = info.flag is not None or default is False
        names = [each.text] if named else []  # there is no `--no-...` for what is off by default
        declared = typer.Option(*names, envvar=info.env, **about)
    return Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[type, declared])


def option_parser(function: Callable[[Any], T]) -> Callable[[Any], T | None]:
    """The function, with its ValueError as an error of the option. None is passed through."""

    def parse(value: Any) -> T | None:
        try:
            return None if value is None else function(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parse


def _read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Make the values of a configuration file the defaults of the command's options."""
    if path is None:
        return None
    try:
        values = msgspec.yaml.decode(path.read_bytes(), type=dict[str, _Value | list[_Value]])
    except (OSError, msgspec.MsgspecError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}.") from None
    known: dict[str, Any] = {param.name: param for param in ctx.command.params if param.name != _CONFIG}
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in known:
            raise typer.BadParameter(f"{path}: there is no option {key!r}.{_hint(name, known)}")
        entries = [_as_typed(each) for each in (value if isinstance(value, list) else [value])]
        if known[name].multiple:
            defaults[name] = entries
        elif isinstance(value, list):
            raise typer.BadParameter(f"{path}: {key!r} takes one value.")
        else:
            [defaults[name]] = entries
    ctx.default_map = defaults
    ctx.meta[_CONFIG] = path
    return path


def _as_typed(value: _Value) -> str | None:
    """A value of a file as it would be typed, so that the command line's types check it."""
    return value if value is None else str(value)


def _hint(name: str, known: Iterable[str]) -> str:
    """A suggestion for an unknown option of a file, with a leading blank."""
    if (here := option_here(f"--{name}")) is not None:
        return f" {here}"
    meant = nearest(name, known)
    return "" if meant is None else f" Did you mean {meant.replace('_', '-')!r}?"


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Read options from a YAML file, with lines such as `max-seqs: 32`. "
        "Options on the command line override it.",
        is_eager=True,
        exists=True,
        dir_okay=False,
        callback=_read_config,
    ),
]
