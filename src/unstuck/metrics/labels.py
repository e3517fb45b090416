"""Write labels as one text, the same labels always as the same text, and read them back."""

from collections.abc import Mapping

import msgspec

_decoder = msgspec.json.Decoder(dict[str, str])
_encoder = msgspec.json.Encoder(order="sorted")


def encode_labels(labels: Mapping[str, str]) -> str:
    return _encoder.encode(labels).decode()


def decode_labels(text: str) -> dict[str, str]:
    return _decoder.decode(text)
