"""Damages files: blindly, and by what their format means, so that a damaged value gets past the first check."""

import io
import json
import pickletools
import re
import struct
import warnings
import zipfile
import zlib

NUMBERS = [0, 1, 2, 3, 5, 127, 128, 255, 256, 65535, 65536, 2**24, 2**31 - 1, 2**31, 2**32, 2**40, 2**53 + 1, 2**62, 2**63 - 1]
NUMBERS += [2**63, 2**64 - 1, 2**64, 10**30]
NUMBERS += [-n for n in NUMBERS[1:]]
REALS = ["0.0", "-0.0", "0.5", "1e-320", "1e308", "1e309", "-1e309", "nan", "inf", "-inf", "3.0000000000000004"]
WORDS = ["", " ", "\x00", "a" * 70000, "../../../../etc/passwd", "/dev/full", "é", "\ud800", "\U0001f600", "null", "model", "%s%n", "-1", "\\"]


# --- Any bytes ----------------------------------------------------------------------------------


def place(data, random):
    return random.randrange(len(data) + 1)


def flip_bits(data, random):
    out = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 2, 8, 64]) if out else 0):
        out[random.randrange(len(out))] ^= 1 << random.randrange(8)
    return bytes(out)


def truncate(data, random):
    return data[: random.choice([0, 1, len(data) // 2, max(len(data) - 1, 0), place(data, random)])]


def insert(data, random):
    at = place(data, random)
    new = random.choice([b"\x00", b"\xff", b"\n", b'"', b"{", b"[", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf"])
    return data[:at] + new * random.choice([1, 1, 3, 1000]) + data[at:]


def insert_noise(data, random):
    at = place(data, random)
    return data[:at] + random.randbytes(random.choice([1, 7, 100])) + data[at:]


def remove(data, random):
    at = place(data, random)
    return data[:at] + data[at + random.choice([1, 2, 4, 8, 100, 1000]) :]


def repeat(data, random):
    at = place(data, random)
    part = data[at : at + random.choice([1, 10, 100, 2000])]
    return data[:at] + part * random.choice([2, 3, 50]) + data[at + len(part) :]


def exchange(data, random):
    a, b = sorted([place(data, random), place(data, random)])
    size = random.choice([1, 4, 16, 200])
    return data[:a] + data[b : b + size] + data[a + size : b] + data[a : a + size] + data[b + size :]


def write_number(data, random):
    """An integer of 1 to 8 bytes, such as sizes and offsets are."""
    code = random.choice("BHIQ")
    size = struct.calcsize(code)
    if len(data) < size:
        return data
    at = random.randrange(min(len(data) - size + 1, random.choice([16, 256, len(data)])))
    value = random.choice(NUMBERS) % 2 ** (8 * size)
    return data[:at] + struct.pack(random.choice("<>") + code, value) + data[at + size :]


BLIND = [flip_bits, flip_bits, truncate, insert, insert_noise, remove, repeat, exchange, write_number]


# --- Text ---------------------------------------------------------------------------------------


def swap_number(data, random):
    """A number as digits becomes another."""
    found = list(re.finditer(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?", data))
    if not found:
        return data
    match = random.choice(found)
    new = random.choice([str(random.choice(NUMBERS)), random.choice(REALS)])
    return data[: match.start()] + new.encode() + data[match.end() :]


def move_line(data, random):
    lines = data.split(b"\n")
    line = lines.pop(random.randrange(len(lines)))
    if random.random() < 0.6:
        lines.insert(random.randrange(len(lines) + 1), line)
    if random.random() < 0.3:
        lines.insert(random.randrange(len(lines) + 1), line)
    return b"\n".join(lines)


def change_field(data, random):
    """One of a line's fields is lost, doubled, emptied or made long."""
    lines = data.split(b"\n")
    at = random.randrange(len(lines))
    gap = b"\t" if b"\t" in lines[at] else b" "
    fields = lines[at].split(gap)
    field = random.randrange(len(fields))
    fields[field : field + 1] = random.choice([[], [b""], [fields[field]] * 2, [b"x" * 70000], [b"\xff\xfe"], [fields[0]]])
    lines[at] = gap.join(fields)
    return b"\n".join(lines)


TOML_VALUES = ["true", '""', "[]", "{}", "[[]]", "[1, 'a']", "1979-05-27", "'" + "x" * 5000 + "'", "'/dev/full'", "'..'"]


def change_toml(data, random):
    """The value of a key, in a table of any form, becomes another, or a key another key."""
    text = data.decode(errors="replace")
    found = list(re.finditer(r"([\w.]+)(\s*=\s*)('[^']*'|\"[^\"]*\"|\[[^\]\n]*\]|[-+\w.]+)", text))
    if not found:
        return data
    match, other = random.choice(found), random.choice(found)
    key, equals, value = match.groups()
    way = random.randrange(5)
    if way == 0:
        value = other[3]
    elif way == 1:
        key = other[1]
    elif way == 2:
        value = random.choice(TOML_VALUES)
    else:
        value = random.choice([str(random.choice(NUMBERS)), random.choice(REALS)])
    return (text[: match.start()] + key + equals + value + text[match.end() :]).encode()


JINJA = ["range(1000000000)", "'a' * 1000000000000", "messages[99999999999999999999]", "1 / 0", "messages | tojson", "((((1))))" * 50, "not " * 3000 + "1"]
JINJA += ["(" * 20000 + "1" + ")" * 20000, "loop.index", "x.y.z", "raise_exception('no')", "messages | join | upper | trim", "{'a': [1, {}]}"]


def change_jinja(data, random):
    """An expression or a tag of a template becomes another, or is lost or doubled."""
    found = list(re.finditer(rb"(\{[{%]-?)(.*?)(-?[%}]\})", data, re.S))
    if not found:
        return data
    match, other = random.choice(found), random.choice(found)
    way = random.randrange(4)
    if way == 0:
        new = random.choice([b"", match[0] * random.choice([2, 300])])
    elif way == 1:
        new = other[0]
    else:
        inner = random.choice(JINJA).encode()
        new = match[1] + random.choice([inner, b" for x in " + inner + b" ", b" set x = " + inner + b" ", b" if " + inner + b" "]) + match[3]
    return data[: match.start()] + new + data[match.end() :]


# --- JSON ---------------------------------------------------------------------------------------

DEEP = "@deep@"


def parsed(data):
    """The JSON value, or None for what is none or is nested too deep for Python."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def places(value, path=()):
    """Every place in a JSON value, as a path of keys and indices."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, path + (key,))


def change_value(root, random):
    """A JSON value with one of its parts changed."""
    paths = list(places(root))
    get = lambda path: root if not path else get(path[:-1])[path[-1]]
    path = random.choice(paths)
    if not path:
        return random.choice([[], None, [root], 1, "x", {}])
    parent, key, old = get(path[:-1]), path[-1], get(path)
    way = random.randrange(9)
    if way == 0:
        del parent[key]
    elif way == 1:  # what stands elsewhere
        parent[key] = json.loads(json.dumps(get(random.choice(paths))))
    elif way == 2:
        parent[key] = random.choice([None, True, False, [], {}, [old], {"a": old}, str(old), DEEP])
    elif way == 3 and isinstance(parent, dict):
        parent[random.choice(WORDS + [str(key) + "x"])] = parent.pop(key)
    elif way == 4 and isinstance(old, (list, dict)) and old:
        if isinstance(old, list):
            parent[key] = old * random.choice([2, 100])
        else:
            parent[key] = list(old.values())
    elif way == 5:
        parent[key] = random.choice(WORDS)
    elif isinstance(old, float) or way == 6:
        parent[key] = random.choice([0.5, 1e308, -1e308, 5e-324, -0.0, float("nan"), float("inf")])
    else:
        parent[key] = random.choice(NUMBERS)
    return root


def change_json(data, random):
    root = parsed(data)
    if root is None:
        return flip_bits(data, random)
    for _ in range(random.choice([1, 1, 2, 4])):
        if isinstance(root, (dict, list)):
            root = change_value(root, random)
    text = json.dumps(root, ensure_ascii=random.random() < 0.5)
    # Nested far deeper than anybody would write, in lists or in whole copies of the file.
    deep = random.choice([100, 3000, 200000])
    before, _, after = text.partition(f'"{DEEP}"')
    if f'"{DEEP}"' in text:
        if random.random() < 0.5 or (len(before) + len(after)) * deep > 4e6:
            text = before + "[" * deep + "]" * deep + after
        else:
            text = before * deep + "null" + after * deep
    return text.encode(errors="surrogatepass")


def nest_json(data, random):
    """A table inside itself under one of its own keys, over and over: what reads it recursively goes as deep."""
    root = parsed(data)
    found = [path for path in places(root) if path]
    if not found:
        return data
    path = random.choice(found)
    get = lambda p: root if not p else get(p[:-1])[p[-1]]
    parent = get(path[:-1])
    inner = dict(parent) if isinstance(parent, dict) else list(parent)
    inner[path[-1]] = [DEEP] if isinstance(inner[path[-1]], list) else DEEP
    before, _, after = json.dumps(inner).partition(f'"{DEEP}"')
    deep = min(random.choice([70, 2000, 100000]), 4000000 // max(len(before) + len(after), 1))
    if not path[:-1]:
        return (before * deep + "null" + after * deep).encode()
    get(path[:-2])[path[-2]] = DEEP
    left, _, right = json.dumps(root).partition(f'"{DEEP}"')
    return (left + before * deep + "null" + after * deep + right).encode()


def change_json_line(data, random):
    lines = data.split(b"\n")
    at = random.randrange(len(lines))
    lines[at] = change_json(lines[at], random)
    return b"\n".join(lines)


# --- Checkpoints --------------------------------------------------------------------------------


def change_safetensors(data, random):
    """The header: names, types, shapes, offsets; its length fits again."""
    (size,) = struct.unpack("<Q", data[:8]) if len(data) >= 8 else (0,)
    header = random.choice([change_json, swap_number])(data[8 : 8 + size], random)
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


def crc64(data):
    """Of state.json, as the program computes it (Jones' polynomial, reflected)."""
    crc = 0
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x95AC9329AC4BC9B5 if crc & 1 else 0)
    return crc


def change_state(data, random):
    """state.json with a value changed and the checksum that fits."""
    state = parsed(data)
    if not isinstance(state, dict):
        return flip_bits(data, random)
    state.pop("crc64", None)
    state = change_value(state, random)
    if isinstance(state, dict):
        state["crc64"] = crc64(json.dumps(state, separators=(",", ":")).encode())
    return json.dumps(state).encode()


def change_pickle(data, random):
    """A pickle with an operation lost, doubled, moved, or with another number in it."""
    try:
        starts = [position for _, _, position in pickletools.genops(data)]
    except ValueError:
        return flip_bits(data, random)
    operations = [data[a:b] for a, b in zip(starts, starts[1:] + [len(data)])]
    for _ in range(random.choice([1, 1, 3])):
        at, other = random.randrange(len(operations)), random.randrange(len(operations))
        way = random.randrange(5)
        if way == 0:
            operations[at] = b""
        elif way == 1:
            operations[at] *= random.choice([2, 3, 1000])
        elif way == 2:
            operations[at], operations[other] = operations[other], operations[at]
        elif way == 3:
            operations[at] = random.choice([b"K\x00", b"K\xff", b"J\xff\xff\xff\xff", b"\x8a\x08" + random.randbytes(8), b"N", b")", b"0", b"}", b"("])
        else:
            operations[at] = operations[at][:1] + write_number(operations[at][1:], random)
    return b"".join(operations)


def change_zip(data, random):
    """A zip file whose members are changed, lost, doubled or renamed, with checksums that fit."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as source:
            members = [(info.filename, source.read(info)) for info in source.infolist()]
    except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError, RuntimeError, ValueError, struct.error, zlib.error):
        return flip_bits(data, random)
    if not members:
        return data
    at = random.randrange(len(members))
    name, content = members[at]
    way = random.randrange(8)
    if way < 4:  # the pickle, which says what the others are
        at = next((i for i, member in enumerate(members) if member[0].endswith("data.pkl")), at)
        members[at] = (members[at][0], change_pickle(members[at][1], random))
    elif way == 4:
        members[at] = (name, random.choice(BLIND)(content, random))
    elif way == 5:
        members.pop(at)
    elif way == 6:
        members[at] = (name + random.choice(["x", "/", "/../x", "\u00e9"]), content)
    else:
        members.insert(random.randrange(len(members) + 1), random.choice(members))
    out = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED if random.random() < 0.2 else zipfile.ZIP_STORED
    with zipfile.ZipFile(out, "w", kind) as target, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names are doubled on purpose
        for name, content in members:
            info = zipfile.ZipInfo(name)
            info.compress_type = kind
            target.writestr(info, content)
    return out.getvalue()


# --- Vocabularies -------------------------------------------------------------------------------


def varint(data, at):
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    return value, at


def as_varint(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out + bytes([value]))


def parts_of(data):
    """The fields of a protocol buffer: number and kind, and content; None where it is none."""
    out, at = [], 0
    while at < len(data):
        tag, at = varint(data, at)
        kind = tag & 7
        if kind == 0:
            begin = at
            _, at = varint(data, at)
            out.append((tag, data[begin:at]))
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            out.append((tag, data[at : at + size]))
            at += size
        elif kind == 2:
            size, at = varint(data, at)
            out.append((tag, data[at : at + size]))
            at += size
        else:
            return None
    return out if at == len(data) else None


def change_protobuf(data, random, depth=0):
    """A field, perhaps of an inner message, is lost, doubled, moved or changed; lengths fit again."""
    parts = parts_of(data)
    if not parts:
        return flip_bits(data, random)
    at = random.randrange(len(parts))
    tag, content = parts[at]
    way = random.randrange(6)
    if way == 0:
        parts.pop(at)
    elif way == 1:
        parts.insert(random.randrange(len(parts) + 1), parts[at])
    elif way == 2:
        parts.insert(random.randrange(len(parts)), parts.pop(at))
    elif tag & 7 == 2 and depth < 2 and way < 5:
        parts[at] = (tag, change_protobuf(content, random, depth + 1))
    elif tag & 7 == 0:
        parts[at] = (tag, as_varint(random.choice(NUMBERS) % 2**64))
    elif tag & 7 == 2:
        parts[at] = (tag, random.choice(BLIND)(content, random))
    else:
        parts[at] = (tag, random.randbytes(len(content)))
    return b"".join(as_varint(t) + (as_varint(len(c)) if t & 7 == 2 else b"") + c for t, c in parts)


# --- Images -------------------------------------------------------------------------------------


def change_png(data, random):
    """A chunk is lost, doubled or changed, with a checksum that fits."""
    chunks, at = [], 8
    while at + 12 <= len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += 12 + size
    if not chunks:
        return data
    at = 0 if random.random() < 0.4 else random.randrange(len(chunks))
    kind, content = chunks[at]
    way = random.randrange(4)
    if way == 0:
        chunks.pop(at)
    elif way == 1:
        chunks.insert(random.randrange(len(chunks) + 1), chunks[at])
    else:
        chunks[at] = (kind, random.choice([flip_bits, write_number, truncate])(content, random))
    return data[:8] + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content)) for kind, content in chunks
    )


# What is meant by a kind of file; the others are only bytes.
MEANT = {
    "toml": [change_toml, change_toml, swap_number, move_line],
    "json": [change_json, change_json, nest_json, swap_number],
    "jsonl": [change_json_line, swap_number, move_line],
    "state": [change_state, change_json],
    "safetensors": [change_safetensors],
    "zip": [change_zip],
    "protobuf": [change_protobuf],
    "png": [change_png],
    "jinja": [change_jinja, change_jinja, swap_number],
    "columns": [change_field, change_field, move_line, swap_number],
    "text": [move_line, swap_number],
    "bytes": [],
}


def mutate(kind, data, random):
    """`data`, damaged in one to four ways."""
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        meant = MEANT[kind]
        ways = meant if meant and random.random() < 0.6 else BLIND
        data = random.choice(ways)(data, random)[: 1 << 25]
    return data
