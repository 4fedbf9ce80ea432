"""Encoded pictures of other formats. Needs Pillow, of the extra `minari`."""

import io
import math
from typing import Any

import numpy as np

from qfleet.data import Array
from qfleet.errors import UsageError
from qfleet.install import install_command

FORMATS = ("JPEG", "PNG")


def _require_pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError(
            "the pictures of this data set need the package pillow",
            f"It cannot be imported: {error}.",
            f"Run: {install_command('minari')}",
        ) from error
    return Image


def decode_picture(data: bytes, shape: tuple[int, ...]) -> tuple[Array, str]:
    """The pixels, and the format; ValueError if it has another shape, which its header says before it is decoded."""
    image = _require_pillow().open(io.BytesIO(data), formats=FORMATS)
    if (image.height, image.width) != shape[:2]:
        raise ValueError(f"a picture of {image.height} x {image.width} pixels is not one of {shape[:2]}")
    pixels = np.asarray(image, np.uint8)
    if pixels.size != math.prod(shape):
        raise ValueError(f"a picture has the shape {pixels.shape}, and the space {shape}")
    return pixels.reshape(shape), str(image.format)


def encode_picture(pixels: Array) -> bytes:
    """As PNG, which keeps every pixel; readers of JPEG files through Pillow read it as well."""
    target = io.BytesIO()
    _require_pillow().fromarray(pixels).save(target, format="PNG")
    return target.getvalue()


def can_encode(shape: tuple[int, ...]) -> bool:
    """Grey, or two to four colours in the last axis, as Pillow reads them back in the same shape."""
    return len(shape) == 2 or (len(shape) == 3 and shape[2] in (2, 3, 4))
