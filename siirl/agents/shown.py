"""What environments and tools show: text, and images at their places in it. No torch."""

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from siirl.errors import DataError

PLACE = "<image>"
"""Where an image is in a text; see siirl/data/images.py."""
SKIPPED = "(image left out)"
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,")


@dataclass(frozen=True)
class Shown:
    """A text with <image> where each image belongs; without any, the images come before it."""

    text: str = ""

    images: tuple[Any, ...] = ()
    """Each bytes of a file, a path, {bytes, path}, a data: URL, or an image of Pillow; once read, base64."""

    def without_images(self) -> str:
        """The text for a model that sees none."""
        return self.text.replace(PLACE, SKIPPED) if self.images else self.text


def shows_images(value: Any) -> bool:
    """Whether a value is content with images: a Shown, {"text", "images"}, or a list of parts with one."""
    if isinstance(value, Shown):
        return True
    if isinstance(value, Mapping):
        return "images" in value and value.keys() <= {"text", "images"}
    return isinstance(value, list) and any(_is_image(part) for part in value)


def read_shown(value: Any) -> Shown:
    """Content with its images in base64. DataError for what cannot be read, and where places do not match."""
    if isinstance(value, list):
        value = Shown("".join(map(_part_text, value)), tuple(map(_part_image, filter(_is_image, value))))
    elif isinstance(value, Mapping):
        value = Shown(str(value.get("text") or ""), tuple(value["images"] or ()))
    text, images = value.text, tuple(_encoded(image) for image in value.images)
    if images and PLACE not in text:
        text = PLACE * len(images) + text
    if images and text.count(PLACE) != len(images):
        raise DataError(f"it has {text.count(PLACE)} times {PLACE}, and {len(images)} images")
    return Shown(text, images)


def content_of(text: str, images: Sequence[str]) -> str | list[dict[str, Any]]:
    """The content of a chat message: its text, or parts where it has images, which hold them."""
    if not images:
        return text
    left = iter(images)
    parts = [part for part in re.split(f"({PLACE})", text) if part]
    return [
        {"type": "image", "image": next(left)} if part == PLACE else {"type": "text", "text": part}
        for part in parts
    ]


def parts_of(content: Any) -> list[dict[str, Any]]:
    """The content of a chat message as parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def images_in(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The images of chat messages, in order."""
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    return [part["image"] for content in contents for part in content if part.get("type") == "image"]


def as_written(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages with <image> in their texts, as datasets have them."""
    return [
        {**message, "content": "".join(map(_part_text, message["content"]))}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def for_template(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages whose images are places only."""
    return [
        {**message, "content": [_place(part) for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def _place(part: Any) -> Any:
    return {"type": "image"} if _is_image(part) else part


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if _is_image(part):
        return PLACE
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return part["text"]
    raise DataError(f"{part!r:.80} is no part of a message: write type text or image")


def _part_image(part: Mapping[str, Any]) -> Any:
    image = part.get("image_url", part.get("image"))
    return image.get("url") if isinstance(image, Mapping) and "url" in image else image


def _encoded(image: Any) -> str:
    from siirl.data.images import encode_image  # Pillow is imported where there are images

    if isinstance(image, str):
        if url := _DATA_URL.match(image):
            image = base64.b64decode(image[url.end() :])
    elif hasattr(image, "save"):
        held = io.BytesIO()
        image.save(held, format="PNG")
        image = held.getvalue()
    return encode_image(image, "an image")
