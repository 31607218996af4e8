"""`personae chat`: a conversation with a running server, in the terminal."""

from rich.console import Console

from personae.api.commands.conversation import ChatFailed, Conversation
from personae.api.commands.line_editor import ReadLine, is_interactive, line_editor
from personae.api.commands.printable import printable

_COMMANDS = ("/adapter", "/schema", "/system", "/tokens", "/model", "/reset", "/help", "/exit")
_ENDS = ("/exit", "/quit", "/bye")
_HELP = """\
/adapter NAME      talk to an adapter; without a name list all, `/adapter none` is the base
/schema FILE|JSON  bind answers to a JSON Schema; without one answers are free
/system TEXT       instructions for the model; without text none
/tokens            tokens of the latest answer
/model NAME        talk to another model or adapter
/reset             forget the conversation
/exit              end; so do /quit, /bye and Ctrl-D
Ctrl-C stops an answer. Alt-Enter begins a new line."""


def talk(conversation: Conversation, console: Console | None = None, read: ReadLine | None = None) -> bool:
    """Read lines and print answers until the input ends or /exit; False if no server answers."""
    console = console or Console(highlight=False)
    try:
        _note(console, f"talking to {conversation.model}; /help shows the commands")
    except ChatFailed as error:
        _fail(console, error)
        return False
    if read is None:
        read = line_editor(_COMMANDS) if is_interactive() else lambda: console.input("> ")
    while True:
        try:
            line = read().strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return True
        if line in _ENDS:
            return True
        try:
            if line.startswith("/"):
                _command(conversation, console, line)
            elif line:
                _answer(conversation, console, line)
        except ChatFailed as error:
            _fail(console, error)


def _answer(conversation: Conversation, console: Console, text: str) -> None:
    pieces, thinking = conversation.ask(text), False
    try:
        for piece in pieces:
            if thinking and not piece.reasoning:
                console.print("\n")
            thinking = piece.reasoning
            style = "dim" if thinking else None
            console.print(printable(piece.text), end="", style=style, markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        pieces.close()
        _note(console, " (stopped)", end="")
    finally:
        console.print()


def _note(console: Console, text: str, end: str = "\n") -> None:
    console.print(printable(text), end=end, style="dim", markup=False)


def _fail(console: Console, error: ChatFailed) -> None:
    console.print(printable(str(error)), style="red", markup=False)


def _command(conversation: Conversation, console: Console, line: str) -> None:
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    match name:
        case "/reset":
            conversation.reset()
            _note(console, "what was said is forgotten")
        case "/system":
            conversation.system = rest or None
            _note(console, "the model has these instructions" if rest else "the model has no instructions")
        case "/schema" if rest:
            conversation.use_schema(rest)
            _note(console, "answers are bound to the schema; /schema frees them")
        case "/schema":
            conversation.schema = None
            _note(console, "answers are free")
        case "/tokens":
            _note(console, _tokens(conversation))
        case "/model" | "/adapter" if rest:
            base = name == "/adapter" and rest == "none"
            conversation.model = conversation.models()[0] if base else rest
            _note(console, f"talking to {conversation.model}")
        case "/model" | "/adapter":
            names = (
                f"* {name}" if name == conversation.model else f"  {name}" for name in conversation.models()
            )
            console.print(printable("\n".join(names)), markup=False)
        case _:
            _note(console, _HELP)


def _tokens(conversation: Conversation) -> str:
    """What the latest answer took, in words."""
    found = conversation.tokens
    if found is None:
        return "there is no answer yet"
    thought = f", {found.reasoning} of them reasoning" if found.reasoning else ""
    return (
        f"prompt {found.prompt} ({found.cached} from the cache), answer {found.completion}{thought}, "
        f"together {found.prompt + found.completion}"
    )
