"""Compression of large byte strings, with a checksum and a limit on the decompressed size."""

import sys

from qfleet.save.damage import Damaged

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_OPTIONS: dict[int, int] = {zstd.CompressionParameter.compression_level: 1, zstd.CompressionParameter.checksum_flag: 1}


def compress(data: bytes | bytearray | memoryview) -> bytes:
    """One zstd frame with its size and checksum."""
    return zstd.compress(data, options=_OPTIONS)


def decompress(data: bytes | bytearray | memoryview, max_bytes: int) -> bytes:
    """The data given to `compress`; refuses frames that declare or yield more than `max_bytes`."""
    try:
        declared = zstd.get_frame_info(data).decompressed_size
        if declared is not None and declared > max_bytes:
            raise Damaged(
                "A compressed segment", f"it declares {declared} bytes where at most {max_bytes} are expected"
            )
        reader = zstd.ZstdDecompressor()
        # One byte more than allowed: a frame that declares no size is found out without being decompressed whole.
        plain = reader.decompress(data, max_length=max_bytes + 1)
    except zstd.ZstdError as error:
        raise Damaged("A compressed segment", str(error)) from None
    if len(plain) > max_bytes:
        raise Damaged("A compressed segment", f"it holds more than the {max_bytes} bytes expected")
    if not reader.eof or reader.unused_data:
        raise Damaged("A compressed segment", "it does not end where its frame ends")
    return plain
