"""What an adapter's version has for the fields that a request leaves out."""

from functools import lru_cache
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from personae.api.wire.schema import ResponseFormat
from personae.errors import PayloadTooLarge
from personae.kernels.sizes import size_text

MAX_BYTES = 2**16  # of all defaults of a version, as JSON

Text = str | UnsetType | None
Number = float | UnsetType | None
Count = int | UnsetType | None
Flag = bool | UnsetType | None


class RequestDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An adapter's defaults. A request's own field wins. `system` is the system message of conversations that
    have none, and `response_format` binds answers that nothing else binds. `tool_format`, `reasoning_format`
    and `chat_template` replace the model's. In a change an absent field stays, and null removes one."""

    system: Text = UNSET
    temperature: Number = UNSET
    top_p: Number = UNSET
    top_k: Count = UNSET
    min_p: Number = UNSET
    presence_penalty: Number = UNSET
    frequency_penalty: Number = UNSET
    repetition_penalty: Number = UNSET
    max_tokens: Count = UNSET
    stop: str | list[str] | UnsetType | None = UNSET
    speculate: Flag = UNSET
    enable_thinking: Flag = UNSET
    response_format: ResponseFormat | UnsetType | None = UNSET
    tool_format: Text = UNSET
    reasoning_format: Text = UNSET
    chat_template: Text = UNSET

    def get(self, field: str) -> Any:
        """The default of a field, None if there is none."""
        value = getattr(self, field)
        return None if value is UNSET else value

    def changed(self, change: "RequestDefaults") -> "RequestDefaults":
        """These defaults with the fields that `change` names. Raises PayloadTooLarge."""
        named = {
            name: value for name in self.__struct_fields__ if (value := getattr(change, name)) is not UNSET
        }
        merged = msgspec.structs.replace(self, **named)
        gone = {name: UNSET for name in self.__struct_fields__ if getattr(merged, name) is None}
        merged = msgspec.structs.replace(merged, **gone)
        if len(encode_defaults(merged)) > MAX_BYTES:
            raise PayloadTooLarge(f"`defaults` have more than {size_text(MAX_BYTES)}.", param="defaults")
        return merged


NO_DEFAULTS = RequestDefaults()


def encode_defaults(defaults: RequestDefaults) -> str:
    """The defaults as JSON, for `decode_defaults`."""
    return msgspec.json.encode(defaults).decode()


@lru_cache(maxsize=256)
def decode_defaults(text: str) -> RequestDefaults:
    """The defaults that were encoded as `text`."""
    return msgspec.json.decode(text, type=RequestDefaults)
