"""For files with odd values in them: the places where a value may be odd, and the line with which a file is refused."""

import copy


def nodes(value, path=()):
    """The path of each node of a document, its root first."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from nodes(value[key], (*path, key))


def changed(document, path, values):
    """The document with each value in the place of one node in turn."""
    parent = box = {"root": copy.deepcopy(document)}
    *way, last = ("root", *path)
    for key in way:
        parent = parent[key]
    for value in values:
        parent[last] = value
        yield box["root"]


def refused(path, call):
    """The text with which `call(path)` refuses a file, one line that names it; None if it does not."""
    try:
        call(path)
    except ValueError as error:
        said = str(error)
    else:
        return None
    assert said.startswith(f"{path}: ")
    assert "\n" not in said
    assert len(said) < len(str(path)) + 500
    return said
