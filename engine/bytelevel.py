"""GPT-2's alphabet: byte-level tokenizers write each byte of a token as one printable character.

Printable Latin-1 bytes stand for themselves. The other 68 bytes, in order, stand for U+0100 and up.
"""

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]

BYTE_OF_CHAR = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + place): byte for place, byte in enumerate(_OTHERS)
}
