"""Small images in the formats that are read, made without a library."""

import struct
import zlib


def pixels(size, shade):
    return [[((x * 31 + y * 17 + shade) % 256, (x * y + shade) % 256, shade % 256) for x in range(size)] for y in range(size)]


def ppm(rows):
    return b"P6\n%d %d\n255\n" % (len(rows[0]), len(rows)) + bytes(value for row in rows for pixel in row for value in pixel)


def png(rows):
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    lines = b"".join(b"\x00" + bytes(value for pixel in row for value in pixel) for row in rows)
    head = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def jpeg(rows):
    """Grey, baseline; every block of 8 x 8 pixels has one brightness, so that only the first coefficients are written."""

    def segment(marker, content):
        return b"\xff" + bytes([marker]) + struct.pack(">H", len(content) + 2) + content

    bits = []

    def put(value, count):
        bits.extend(value >> i & 1 for i in reversed(range(count)))

    before = 0
    for y in range(0, len(rows), 8):
        for x in range(0, len(rows[0]), 8):
            level = rows[y][x][0] - 128
            step, before = level - before, level
            size = abs(step).bit_length()
            put(size, 4)  # codes of four bits, in order
            put(step if step >= 0 else step + (1 << size) - 1, size)
            put(0, 1)  # the block's other coefficients are 0
    bits += [1] * (-len(bits) % 8)
    scan = bytes(int("".join(map(str, bits[i : i + 8])), 2) for i in range(0, len(bits), 8)).replace(b"\xff", b"\xff\x00")
    frame = struct.pack(">BHHB", 8, len(rows), len(rows[0]), 1) + bytes([1, 0x11, 0])
    first = bytes([0x00]) + bytes([0, 0, 0, 12] + [0] * 12) + bytes(range(12))
    others = bytes([0x10]) + bytes([1] + [0] * 15) + bytes([0])
    return (
        b"\xff\xd8" + segment(0xDB, bytes([0] + [8] * 64)) + segment(0xC0, frame) + segment(0xC4, first) + segment(0xC4, others)
        + segment(0xDA, bytes([1, 1, 0x00, 0, 63, 0])) + scan + b"\xff\xd9"
    )


def cifar(count):
    return b"".join(bytes([i % 10]) + bytes((i * 40 + j) % 256 for j in range(3 * 32 * 32)) for i in range(count))
