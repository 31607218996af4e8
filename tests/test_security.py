"""What must not stand in the tree, and that docs/operate/security.md does not promise tests that there are
not."""

import ast
import re
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from re import _constants as opcodes  # type: ignore[attr-defined]  # the parsed form of a pattern has no public name
from re import _parser as parser  # type: ignore[attr-defined]  # likewise
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("api", "actors", "engine", "lora", "grammar", "integrations", "kernels", "evals")
FILES = [ROOT / "errors.py", *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))]
MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "yaml",
    "zmq",
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {"os.system", "os.popen", "torch.hub.load", "yaml.load", "numpy.load", "np.load", "torch.load"}
MAKES_PICKLES = "evals/tenants/corruption.py"  # evil ones, to upload them; it reads none
FLAGS = {"shell", "trust_remote_code", "allow_pickle", "weights_only"}
CLIENTS = {"httpx", "requests", "aiohttp", "urllib.request", "http.client", "urllib3"}
MAY_ASK = {  # commands, not the server, and the process that fetches adapters from an operator's list
    "api/adapters/sources/fetching.py",
    "api/adapters/cli.py",
    "api/adapters/push.py",
    "api/commands/remote.py",
    "api/commands/conversation.py",
    "api/sse.py",
    "api/tenants/remote.py",
}
WILDCARDS = {"0.0.0.0", "::", "[::]", "*"}
LISTENS = {"create_server", "create_tcp_listener", "start_server", "open_tcp_listeners"}


parsed = cache(ast.parse)


def findings(source: str, where: str = "") -> Iterator[str]:
    """What a file has that it must not have."""
    for node in ast.walk(parsed(source)):
        for name in imported(node):
            top = name.split(".")[0]
            if top in MODULES and where != MAKES_PICKLES:
                yield f"imports {name}"
            if not where.startswith("evals/") and where not in MAY_ASK and {top, name} & CLIENTS:
                yield f"imports {name}, which fetches"
        if isinstance(node, ast.Attribute) and dotted(node).startswith(("pickle.load", "pickle.Unpick")):
            yield "reads a pickle"
        if "AF_UNIX" in (getattr(node, "attr", ""), getattr(node, "id", "")):
            yield "opens a socket with a name"
        if isinstance(node, ast.Call):
            yield from calls(node, where)


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name with attributes; what is neither is left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def calls(node: ast.Call, where: str) -> Iterator[str]:
    name = dotted(node.func)
    keywords = {each.arg: ast.unparse(each.value) for each in node.keywords if each.arg in FLAGS}
    # The demo's training continues from its own checkpoint; `weights_only` reads tensors and no objects.
    own = where == "evals/demo/train.py" and keywords.get("weights_only") == "True"
    if name in BUILTINS or (name in CALLS and not own):
        yield f"calls {name}"
    for keyword in FLAGS - {"weights_only"}:
        if keywords.get(keyword, "False") != "False":
            yield f"passes {keyword}"
    if name.endswith(".bind") and where not in ("api/http/address.py", "evals/demo/train.py"):
        yield "binds a socket"
    if name.split(".")[-1] in LISTENS:
        yield "listens on TCP"
    if name.split(".")[-1] in ("bind", "run", "Config", "serve") and any(
        isinstance(each, ast.Constant) and each.value in WILDCARDS for each in ast.walk(node)
    ):
        yield "listens on every address"


KNOWN = {
    # KV events leave over ZeroMQ where an operator asks for them: frames of msgpack, at the given address.
    "actors/kv_publisher.py imports zmq",
    "actors/kv_publisher.py binds a socket",
    # With --kv-remote: LMCache's server on loopback, in frames of msgpack; what a Mooncake master lists.
    "engine/tiers/lmcache.py imports zmq",
    "engine/tiers/lmcache.py imports zmq.asyncio",
    "engine/tiers/mooncake.py imports httpx, which fetches",
    # An engine that outlives its frontend waits for the next one in the data folder, which only its owner may
    # enter, and takes nothing without a ticket.
    "actors/enginecore/kept.py opens a socket with a name",
    "actors/enginecore/kept.py binds a socket",
    "actors/keeping.py opens a socket with a name",
    # The bench beside llama.cpp asks the system for a free port.
    "evals/bench/llama_cpp.py binds a socket",
    # With --kv-transfer engines give pages to one another, in a folder that only the server's user may enter.
    "actors/enginecore/page_server.py opens a socket with a name",
    "actors/enginecore/page_server.py binds a socket",
    "engine/tiers/transfer.py opens a socket with a name",
    # With --ray they do so between machines: TLS, and both sides show the certificate of a server's engines.
    "actors/enginecore/page_server.py listens on TCP",
    # Engines on other machines call the frontend: a ticket for each connection, and TLS beyond loopback.
    "actors/cluster/listener.py listens on TCP",
    # Ranks of a stage on another node: TLS 1.3, and both sides show the certificate made for this engine.
    "actors/cluster/stage_processes.py listens on TCP",
    # The first of several machines, while it starts: TLS 1.3, and all show the certificate that they share.
    "actors/cluster/stage_machines.py listens on TCP",
    # Where ranks that exchange through torch.distributed find each other: on loopback. See security.md.
    "engine/parallel/process_groups.py listens on TCP",
}


def test_nothing_that_runs_foreign_code_or_allows_it_stands_in_the_tree() -> None:
    found = set()
    for path in FILES:
        where = str(path.relative_to(ROOT))
        found |= {f"{where} {what}" for what in findings(path.read_text(encoding="utf-8"), where)}
    assert len(FILES) > 200
    assert found == KNOWN


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal as m",
        "from yaml import load",
        "import zmq.asyncio",
        "eval(text)",
        "exec(compile(text, '', 'exec'))",
        "__import__(name)",
        "torch.load(file)",
        "torch.load(file, weights_only=True)",
        "np.load(file, allow_pickle=True)",
        "subprocess.run(command, shell=True)",
        "os.system(command)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "socket.bind(address)",
        "anyio.create_tcp_listener(local_port=80)",
        "socket.socket(socket.AF_UNIX)",
        "uvicorn.run(app, host='0.0.0.0')",
        "import requests",
        "from urllib.request import urlopen",
    ],
)
def test_what_must_not_stand_there_would_be_found(line: str) -> None:
    assert list(findings(line, "api/routes.py"))


def test_what_is_harmless_is_not() -> None:
    lines = ("import re, json", "model.eval()", "re.compile('a+')", "bind('127.0.0.1', 0)")
    source = "\n".join([*lines, "subprocess.run([sys.executable])"])
    assert list(findings(source, "api/routes.py")) == []


def patterns() -> Iterator[tuple[str, str]]:
    """Every regular expression that is written down in the tree, and where."""
    for path in FILES:
        for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and re.fullmatch(r"re\.\w+", dotted(node.func)) and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield first.value, f"{path.relative_to(ROOT)}:{node.lineno}"


def backtracks(pattern: str) -> bool:
    """Whether a pattern repeats a repetition, or refers back: then a text of some length takes it years."""

    def nested(parsed: Any, inside: bool) -> bool:
        for code, value in parsed:
            if code in (opcodes.GROUPREF, opcodes.GROUPREF_EXISTS):
                return True
            repeats = code in (opcodes.MAX_REPEAT, opcodes.MIN_REPEAT) and value[1] > 16
            if repeats and inside:
                return True
            if any(nested(part, inside or repeats) for part in parts(value)):
                return True
        return False

    def parts(value: Any) -> Iterator[Any]:
        if isinstance(value, parser.SubPattern):
            yield value
        elif isinstance(value, list | tuple):
            for each in value:
                yield from parts(each)

    return nested(parser.parse(pattern), False)


# A repetition that is repeated, and linear all the same: each turn begins with a backslash, which nothing
# within a turn can match (lora/patterns.py).
TURNS = r"\^?[A-Za-z0-9_.]*(?:\\\.[A-Za-z0-9_.]*)*\$?"


def test_no_regular_expression_of_ours_can_run_away() -> None:
    found = list(patterns())
    assert len(found) > 20
    assert [where for pattern, where in found if backtracks(pattern) and pattern != TURNS] == []
    begun = time.thread_time()
    assert re.fullmatch(TURNS, r"a\." * 30_000 + "!") is None
    assert time.thread_time() - begun < 2
    assert backtracks(r"(a+)+$")
    assert backtracks(r"(?:x|y*)*z")
    assert backtracks(r"(a)\1")
    assert not backtracks(r"(\d+)(\.\d+)?[a-z]*")


def rows() -> list[list[str]]:
    page = (ROOT / "docs" / "operate" / "security.md").read_text(encoding="utf-8")
    table = [line for line in page.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]
    return [row for row in cells if set("".join(row)) != {"-"}][1:]


def test_every_row_of_the_page_names_tests_that_exist() -> None:
    found = rows()
    assert len(found) >= 20
    for row in found:
        assert len(row) == 3, row
        tests = re.findall(r"`(tests/\S+\.py)::(\w+)`", row[2])
        assert tests, row
        for path, name in tests:
            tree = parsed((ROOT / path).read_text(encoding="utf-8"))
            names = {
                node.name
                for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            assert name in names, f"{path} has no {name}"
