"""Images of prompts: from a column of a dataset to base64 text, which rows carry, and back."""

import base64
import binascii
import functools
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from siirl.data.chat import Prompt
from siirl.errors import DataError

PLACE = "<image>"
"""Where an image is in the text of a message, as verl has it."""
_UNREADABLE = (OSError, UnidentifiedImageError, ValueError, SyntaxError, Image.DecompressionBombError)


def read_images(value: Any, where: str) -> list[str]:
    """The images of a cell of the column, in base64; of null none.

    value: one image or a list: bytes of a file, a path, or {"bytes", "path"} as datasets write it, with
    "image" in the place of "path" as verl's processing takes it. DataError, with `where`, for anything else,
    and for what is no image.
    """
    if value is None:
        return []
    images = value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
    return [encode_image(image, f"{where}: image {number + 1}") for number, image in enumerate(images)]


def num_images(value: Any) -> int:
    """How many images a cell of the column holds."""
    many = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return len(value) if many else int(value is not None)


def encode_image(image: Any, where: str) -> str:
    """An image of a cell in base64. DataError, with `where`, for what is none."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path") or image.get("image")
    if isinstance(image, str):
        image = _read_file(image, where)
    if not isinstance(image, bytes):
        raise DataError(
            f"{where} is {type(image).__name__}: an image is the bytes of a file, a path, or "
            "{bytes, path}. Convert the column."
        )
    text = base64.b64encode(image).decode("ascii")
    try:
        image_size(text)
    except _UNREADABLE as error:
        raise DataError(f"{where} is no image that can be read: {error}. Replace it.") from error
    return text


def _read_file(name: str, where: str) -> bytes:
    if "://" in name and not name.startswith("file://"):
        raise DataError(f"{where} is {name[:80]}: only files are read. Download it, or store its bytes.")
    path = Path(name.removeprefix("file://")).expanduser()
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise DataError(f"{where}, {path}, cannot be read: {error}. Correct the path.") from error


@functools.lru_cache(maxsize=4096)
def image_size(image: str) -> tuple[int, int]:
    """Height and width in pixels, from the head of the file. What PIL raises for what is no image."""
    try:
        data = base64.b64decode(image, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(io.BytesIO(data)) as opened:
                return opened.height, opened.width
        except Image.DecompressionBombWarning as error:
            raise ValueError(str(error)) from error


def open_image(image: str) -> Image.Image:
    """The image in RGB. DataError for a file that is cut short."""
    try:
        return Image.open(io.BytesIO(base64.b64decode(image))).convert("RGB")
    except _UNREADABLE as error:
        raise DataError(f"an image of a prompt is damaged: {error}. Replace it.") from error


def with_image_parts(prompt: Prompt, num_images: int, where: str) -> Prompt:
    """Messages whose content is a list of parts, as chat templates of vision models take them.

    Each <image> becomes a part {"type": "image"}. DataError unless there is one for each image. Without
    images the prompt stays as it is.
    """
    if not num_images:
        return prompt
    if isinstance(prompt, str):
        raise DataError(
            f"{where}: the prompt is a plain string, and the row has images: a chat template writes their "
            "places. Write it as chat messages, with <image> where each image belongs."
        )
    parts = [re.split(f"({PLACE})", message.get("content") or "") for message in prompt]
    places = sum(part == PLACE for of_message in parts for part in of_message)
    if places != num_images:
        raise DataError(
            f"{where}: the prompt has {places} times {PLACE}, and the row has {num_images} images: each is "
            f"put where one {PLACE} stands. Write the prompt again."
        )
    return [
        {**message, "content": [_part(part) for part in of_message if part]}
        for message, of_message in zip(prompt, parts, strict=True)
    ]


def _part(text: str) -> dict[str, str]:
    return {"type": "image"} if text == PLACE else {"type": "text", "text": text}
