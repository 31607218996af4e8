"""`personae launch`: starts an agent on a running server, with the settings that it needs."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from personae.api.commands.remote import checked, server, server_root
from personae.errors import RequestError

_KEY = "PERSONAE_API_KEY"
_NO_KEY = "none"


@dataclass(frozen=True, slots=True)
class Agent:
    """A program that runs on this server. `least_context` is what its own instructions and tools need, in
    tokens, with room for an answer."""

    name: str
    title: str
    install: str
    least_context: int


AGENTS = {
    "claude": Agent("claude", "Claude Code", "npm install -g @anthropic-ai/claude-code", 32_768),
    "codex": Agent("codex", "Codex", "npm install -g @openai/codex", 16_384),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """What is executed: a program, its arguments (the first is its own name) and its environment."""

    program: str
    arguments: tuple[str, ...]
    env: dict[str, str]


def prepared(
    name: str,
    arguments: Sequence[str],
    *,
    url: str,
    model: str | None,
    key: str | None,
    env: Mapping[str, str] | None = None,
) -> Launch:
    """How to start the agent on the server at `url`, with a `model` or the server's first.

    Raises RequestError if there is no such agent, it is not installed, the server does not answer or has no
    such model, or the model's context is too short.
    """
    env = dict(os.environ if env is None else env)
    agent = AGENTS.get(name)
    if agent is None:
        raise RequestError(f"there is no agent {name!r}; there are {', '.join(AGENTS)}", param="agent")
    program = shutil.which(name, path=env.get("PATH"))
    if program is None:
        raise RequestError(f"{agent.title} is not installed; install it with `{agent.install}`")
    chosen, context = _model(url, model, key)
    if context < agent.least_context:
        raise RequestError(
            f"{agent.title} needs a context of {agent.least_context} tokens, and that of {chosen} has "
            f"{context}; serve a model with a longer one, or raise --max-model-len"
        )
    if name == "claude":
        env.pop("ANTHROPIC_API_KEY", None)  # of another account
        return Launch(program, (name, *arguments), env | _claude(server_root(url), chosen, key))
    return Launch(
        program, (name, *_codex(server_root(url), chosen), *arguments), env | {_KEY: key or _NO_KEY}
    )


def start(launch: Launch) -> None:
    """Become the program."""
    os.execve(launch.program, launch.arguments, launch.env)  # noqa: S606  that is the command


def _model(url: str, model: str | None, key: str | None) -> tuple[str, int]:
    """The model that answers, and the tokens of its context."""
    with server(url, key) as client:
        cards = checked(client.get("/v1/models")).json()["data"]
    lengths = {card["id"]: int(card["max_model_len"]) for card in cards}
    chosen = next(iter(lengths)) if model is None else model
    if chosen not in lengths:
        raise RequestError(f"there is no model {chosen!r}; there are {', '.join(lengths)}")
    return chosen, lengths[chosen]


def _claude(root: str, model: str, key: str | None) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_AUTH_TOKEN": key or _NO_KEY,
        "ANTHROPIC_MODEL": model,
        "ANTHROPIC_SMALL_FAST_MODEL": model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def _codex(root: str, model: str) -> list[str]:
    provider = {"name": "Personae", "base_url": f"{root}/v1", "wire_api": "responses", "env_key": _KEY}
    table = ",".join(f"{name}={_toml(text)}" for name, text in provider.items())
    settings = {
        "model": _toml(model),
        "model_provider": _toml("personae"),
        "model_providers.personae": f"{{{table}}}",
    }
    return [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]


def _toml(text: str) -> str:
    """A text as TOML writes it."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
